"""The keys of adapters: verl's two spellings, valid combinations, and what is refused."""

from __future__ import annotations

import pytest

from tandem.config.explain import explain
from tandem.config.load import load_sft_config
from tandem.errors import ConfigErrors

M = "actor_rollout_ref.model"
RANK, TARGETS = f"{M}.lora_rank", f"{M}.target_modules"
KL = "actor_rollout_ref.actor.use_kl_loss=true"
REF = "actor_rollout_ref.ref"


def test_defaults_are_those_of_verl(load):
    for model in (load().config.actor_rollout_ref.model, load().config.critic.model):
        assert (model.lora_rank, model.lora_alpha) == (0, 16)
        assert (model.target_modules, model.exclude_modules) == (("all-linear",), ())


def test_values_of_a_verl_command_line(load):
    words = (f"{RANK}=32", f"{M}.lora_alpha=32", f"{TARGETS}=all-linear", f"{M}.exclude_modules=null")
    loaded = load(*words, "critic.model.lora_rank=8", "algorithm.adv_estimator=gae")
    model = loaded.config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (32, 32, ("all-linear",))
    assert loaded.config.critic.model.lora_rank == 8
    assert loaded.notices == ()
    listed = load(f"{RANK}=8", f"{TARGETS}=[q_proj,v_proj]", f"{M}.exclude_modules=v_proj").config
    assert listed.actor_rollout_ref.model.target_modules == ("q_proj", "v_proj")
    assert listed.actor_rollout_ref.model.exclude_modules == ("v_proj",)
    assert model.without_adapters.lora_rank == 0 and model.without_adapters.path == model.path


def test_the_other_spelling_works_with_a_sentence(load):
    loaded = load(f"{M}.lora.rank=8", f"{M}.lora.alpha=4", f"{M}.lora.target_modules=[q_proj]")
    model = loaded.config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (8, 4, ("q_proj",))
    assert loaded.notices[0] == f"{M}.lora.rank is {RANK}=8 here."
    assert len(loaded.notices) == 3


@pytest.mark.parametrize(
    ("overrides", "field", "message"),
    [
        ((f"{M}.lora_alpha=32",), f"{M}.lora_alpha", "has no effect"),
        ((f"{TARGETS}=[q_proj]",), TARGETS, "has no effect"),
        ((f"{M}.exclude_modules=[q_proj]",), f"{M}.exclude_modules", "has no effect"),
        (("critic.model.lora_alpha=8",), "critic.model.lora_alpha", "has no effect"),
        (("reward_model.model.lora_rank=8",), "reward_model.model.lora_rank", "has no effect"),
        (
            (f"{RANK}=8", f"{TARGETS}=[all-linear,q_proj]"),
            TARGETS,
            "all-linear cannot be combined with names",
        ),
        ((f"{RANK}=8", f"{TARGETS}=[]"), TARGETS, "the list is empty"),
        (
            (f"{M}.lora_adapter_path=/nowhere", f"{RANK}=8"),
            f"{M}.lora_adapter_path",
            "not a folder of adapters",
        ),
        ((f"{RANK}=-1",), RANK, "out of range"),
        ((f"{RANK}=8", f"{M}.lora_alpha=0"), f"{M}.lora_alpha", "out of range"),
    ],
)
def test_refused(errors, overrides, field, message):
    (error,) = errors(*overrides).values()
    assert error.field == field and message in error.message


def test_an_unset_key_is_told_where_it_counts(errors):
    (error,) = errors(f"{M}.lora_alpha=32").values()
    assert error.expected == f"set only if {RANK} is above 0"


def test_the_reference_is_the_actor_unless_it_is_placed_apart(load):
    words = (KL, f"{REF}.fsdp_config.param_offload=true")
    assert load(*words).notices == ()
    (notice,) = load(*words, f"{RANK}=8").notices
    assert notice.startswith(f"{REF}.fsdp_config.param_offload: no effect;")
    assert notice.endswith("without its adapters is the reference.")
    apart = ("trainer.resource_pools={a: [1], b: [1]}", "trainer.placement={actor_rollout: a, ref: b}")
    (notice,) = load(*words, *apart, f"{RANK}=8").notices
    assert notice.startswith(f"{RANK}: the reference policy runs in a different place")


def test_fine_tuning_has_the_same_keys(train_file, model):
    words = [f"data.train_files={train_file}", f"model.path={model}"]
    assert load_sft_config(None, [*words, "model.lora_rank=4"]).config.model.lora_rank == 4
    with pytest.raises(ConfigErrors) as caught:
        load_sft_config(None, [*words, "model.lora_alpha=4"])
    assert [error.field for error in caught.value.errors] == ["model.lora_alpha"]


def test_explained():
    assert f"renamed: {RANK}" in explain(f"{M}.lora.rank")
