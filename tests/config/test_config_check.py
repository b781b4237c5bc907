"""The check of a loaded config: all errors at once, views, and rules that read an invalid value."""

import pytest

from tandem.config.check import check
from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.config.section import InvalidValueRead
from tandem.config.view import changed, path, root, view_of
from tandem.errors import ConfigErrors
from tests.support.words import full, words


def test_a_view_reads_as_the_config_does(load):
    config = load("Q={a: [2], b: [1]} P.critic=b").config
    view = view_of(config, frozenset({"trainer.placement"}), frozenset({"trainer.seed"}))
    assert isinstance(view, TrainConfig) and view.needs_critic and view.roles == config.roles
    assert view.trainer.pools == config.trainer.pools and view.trainer.devices_of("critic") == 1
    assert path(view.trainer.cluster, "address") == "trainer.cluster.address"
    assert path(config.trainer.cluster, "address") == "address"
    assert changed(view.trainer, "placement") and not changed(view.trainer, "resource_pools")
    assert root(view.actor_rollout_ref.actor.optim).data.max_prompt_length == 512
    with pytest.raises(InvalidValueRead):
        _ = view.trainer.seed
    assert view.trainer.nnodes == 1


def test_a_rule_that_reads_a_wrong_value_is_silent_from_there_on(load):
    def rule(config):
        yield "before"
        yield f"seed {config.trainer.seed}"

    config = load().config
    assert check(config, frozenset(), frozenset(), [rule]).notices == ["before", "seed 0"]
    assert check(config, frozenset(), frozenset({"trainer.seed"}), [rule]).notices == ["before"]


def test_an_inherited_value_is_looked_at_where_it_was_set(errors):
    """An inherited value is checked once at its source if the source is used, otherwise at each heir."""
    phases = [full(f"{at}.log_prob_max_token_len_per_gpu") for at in ("R", "REF")]
    source = full("A.ppo_max_token_len_per_gpu")
    used = f"A.use_kl_loss=true {source}=1000"
    assert set(errors(used, "A.use_dynamic_bsz=true")) == {source}
    assert set(errors(used, f"A.use_dynamic_bsz=true {phases[0]}=900")) == {source, phases[0]}
    by_tokens = [key.replace("max_token_len_per_gpu", "use_dynamic_bsz=true") for key in phases]
    assert set(errors(used, *by_tokens)) == set(phases)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ("critic.fsdp_config.tensor_parallel_size=3 reward_model.enable=perhaps",
         {"critic.fsdp_config.tensor_parallel_size", "reward_model.enable"}),
        ("R.name=tgi", {full("R.server.urls"), full("R.name")}),
        ("sft: trainer.resource_pools={a: [2]} trainer.placement=x",
         {"trainer.resource_pools.a", "trainer.placement"}),
        ("rm: trainer.resource_pools={a: [2]} trainer.placement=x",
         {"trainer.resource_pools.a", "trainer.placement"}),
        ("rm: center_rewards_coefficient=-1 data.messages_key=x",
         {"center_rewards_coefficient", "data.messages_key"}),
        ("sft: trainer.critic_warmup=3 max_token_len_per_gpu=1000 trainer.test_freq=5 optim.min_lr_ratio=0.1",
         {"trainer.critic_warmup", "optim.min_lr_ratio", "max_token_len_per_gpu", "trainer.test_freq"}),
        ("critic.ppo_micro_batch_size=5 trainer.n_gpus_per_node=many", {"trainer.n_gpus_per_node"}),
        ("critic.ppo_micro_batch_size=5 trainer.placement.critic=nowhere", {"trainer.placement.critic"}),
    ],
)  # fmt: skip
def test_several_errors_are_said_together(errors, given, fields):
    assert set(errors(given)) == fields


def test_everything_wrong_is_said_at_once_in_the_order_of_the_fields(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("data: {train_fils: x, shuffle: maybe}\ntrainer: {nnodes: 0}\n")
    given = words("A.ppo_mini_batch_size=1000 algorithm.adv_estimator=grop R.name=vlm")
    with pytest.raises(ConfigErrors) as caught:
        load_train_config(str(path), ["broken", *given])
    assert [error.field for error in caught.value.errors] == [
        None, "data.train_fils", "data.train_files", "data.shuffle", full("M.path"),
        full("A.ppo_mini_batch_size"), full("R.name"), "algorithm.adv_estimator", "trainer.nnodes",
    ]  # fmt: skip
    first = caught.value.errors[0]
    assert (first.got, first.expected) == ("broken", "key=value")
    assert [error.message for error in caught.value.errors].count("missing") == 2
    assert str(caught.value).count("got: ") == 6


@pytest.mark.parametrize("text", ["a: [1", "- a\n- b\n", "a: 1\na: 2\n", None])
def test_a_file_that_is_absent_or_unreadable(tmp_path, required, text):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        load_train_config(str(path), required)
    (error,) = caught.value.errors
    assert (error.got if text is None else error.field) == str(path)
