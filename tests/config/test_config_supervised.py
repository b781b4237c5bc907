"""The configs of `tandem sft` and `tandem rm`: defaults, devices, and what is refused."""

from __future__ import annotations

import pytest

from tandem.config.load import load_rm_config, load_sft_config
from tandem.config.written import to_dict
from tandem.errors import ConfigErrors

LOADERS = {"sft": load_sft_config, "rm": load_rm_config}
both = pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)


@pytest.fixture
def given(train_file, model):
    return [f"data.train_files={train_file}", f"model.path={model}"]


def refused(load, words):
    with pytest.raises(ConfigErrors) as caught:
        load(None, words)
    return {error.field: error for error in caught.value.errors}


@both
def test_one_process_unless_more_are_asked_for(load, given):
    def place(*words):
        loaded = load(None, [*given, *words])
        assert loaded.notices == ()
        return loaded.config.trainer.resolved_backend, loaded.config.trainer.pools

    assert place() == ("local", {"global_pool": (1,)})
    assert place("trainer.backend=ray") == ("ray", {"global_pool": (1,)})
    assert place("trainer.n_gpus_per_node=2", "trainer.nnodes=3") == ("ray", {"global_pool": (2, 2, 2)})


@both
def test_several_processes_do_not_fit_into_one(load, given):
    found = refused(load, [*given, "trainer.backend=local", "trainer.nnodes=2"])
    assert found["trainer.backend"].got == "local, with 2 processes"
    found = refused(load, [*given, "trainer.n_gpus_per_node=2", "trainer.cluster.address=nowhere"])
    assert set(found) == {"trainer.cluster.address"}


@both
def test_pools_and_roles_are_of_reinforcement_alone(load, given):
    found = refused(load, [*given, "trainer.resource_pools={a: [2]}", "trainer.placement=x"])
    assert set(found) == {"trainer.resource_pools.a", "trainer.placement"}


@both
def test_keys_of_several_processes_do_nothing_in_one(load, given):
    words = ("trainer.timeouts.call=5", "trainer.balance_batch=false", "trainer.max_restarts=1")
    notices = load(None, [*given, *words]).notices
    assert len(notices) == 2
    assert any("trainer.max_restarts, trainer.timeouts.call: no effect" in notice for notice in notices)
    assert load(None, [*given, *words[:2], "trainer.n_gpus_per_node=2"]).notices == ()


def test_a_pair_must_fit_into_a_micro_batch(given):
    words = [*given, "data.max_length=100", "max_token_len_per_gpu=199"]
    found = refused(load_rm_config, words)
    assert found["max_token_len_per_gpu"].remedy.startswith("set max_token_len_per_gpu=200")
    assert load_sft_config(None, words).config.train_batching.max_tokens == 199


def test_rm_config(given):
    config = load_rm_config(None, [*given, "trainer.seed=5"]).config
    assert (config.data.chosen_key, config.data.rejected_key, config.data.margin_key) == (
        "chosen",
        "rejected",
        None,
    )
    assert (config.center_rewards_coefficient, config.data.seed, config.optim.lr) == (0, 5, 1e-5)
    assert list(to_dict(config))[:2] == ["data", "model"]
    found = refused(load_rm_config, [*given, "center_rewards_coefficient=-1", "data.messages_key=x"])
    assert set(found) == {"center_rewards_coefficient", "data.messages_key"}
