"""The options of a training engine: their defaults, and which cannot be combined."""

from __future__ import annotations

import pytest

from tandem.config.load import load_sft_config
from tandem.errors import ConfigErrors

ACTOR, REF, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "model"))
COMPILES, REPEATS = "fsdp_config.use_torch_compile", "fsdp_config.full_determinism"
TWO = ("trainer.n_gpus_per_node=2",)


def test_defaults(load):
    config = load().config
    policy = config.actor_rollout_ref
    for section in (policy.actor, policy.ref, config.critic, config.reward_model):
        fsdp = section.fsdp_config
        assert not fsdp.use_torch_compile and not fsdp.full_determinism
        assert fsdp.wrap_policy.transformer_layer_cls_to_wrap == () and fsdp.wrap_policy.min_num_params == 0


def test_the_reference_is_compiled_as_the_actor_is(load):
    compiled = f"{ACTOR}.{COMPILES}=true"
    for words, wanted in (
        ((compiled,), (True, True, False)),
        ((compiled, f"{REF}.{COMPILES}=false"), (True, False, False)),
        ((f"critic.{COMPILES}=true",), (False, False, True)),
        ((f"{ACTOR}.use_torch_compile=true",), (True, True, False)),
        ((f"{ACTOR}.use_torch_compile=true", f"{REF}.use_torch_compile=false"), (True, False, False)),
        (("critic.use_torch_compile=true",), (False, False, True)),
    ):
        config = load("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true", *words).config
        policy = config.actor_rollout_ref
        sections = (policy.actor, policy.ref, config.critic)
        assert tuple(section.fsdp_config.use_torch_compile for section in sections) == wanted


def test_determinism_is_each_models_own(load):
    policy = load(f"{ACTOR}.{REPEATS}=true", f"{ACTOR}.use_kl_loss=true").config.actor_rollout_ref
    assert policy.actor.fsdp_config.full_determinism and not policy.ref.fsdp_config.full_determinism


# overrides: (field, got, remedy) of the only error
WRONG = {
    (*TWO, f"{ACTOR}.{COMPILES}=true", f"{ACTOR}.fsdp_config.tensor_parallel_size=2",
     f"{REF}.{COMPILES}=false"): (
        f"{ACTOR}.{COMPILES}",
        f"true with {ACTOR}.fsdp_config.tensor_parallel_size=2",
        f"set {ACTOR}.{COMPILES}=false, or {ACTOR}.fsdp_config.tensor_parallel_size=1",
    ),
    (f"critic.{COMPILES}=true", "critic.model.use_liger=true"): (
        f"critic.{COMPILES}", "true with critic.model.use_liger=true", "set one of the two to false",
    ),
    (f"{ACTOR}.{REPEATS}=true", f"{MODEL}.use_fused_kernels=true",
     f"{MODEL}.fused_kernel_options.impl_backend=liger"): (
        f"{ACTOR}.{REPEATS}",
        f"true with {MODEL}.fused_kernel_options.impl_backend=liger",
        f"set {MODEL}.fused_kernel_options.impl_backend=auto, or {ACTOR}.{REPEATS}=false",
    ),
    ("critic.fsdp_config.full_determinism=true", "critic.model.use_liger=true"): (
        f"critic.{REPEATS}", "true with critic.model.use_liger=true",
        f"set critic.model.use_liger=false, or critic.{REPEATS}=false",
    ),
    ("critic.fsdp_config.dtype=fp64", "critic.model.use_liger=true"): (
        "critic.fsdp_config.dtype", "fp64 with critic.model.use_liger=true",
        "set critic.model.use_liger=false, or critic.fsdp_config.dtype=fp32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("overrides", WRONG, ids=" ".join)
def test_refused(errors, overrides):
    found = errors("algorithm.adv_estimator=gae", *overrides)
    field, got, remedy = WRONG[overrides]
    assert set(found) == {field}
    assert (found[field].got, found[field].remedy) == (got, remedy)


def test_values_of_the_wrong_kind(errors):
    wrap = f"{ACTOR}.fsdp_config.wrap_policy"
    assert errors(f"{wrap}.min_num_params=-1")[f"{wrap}.min_num_params"].expected == "integer >= 0"
    assert f"{ACTOR}.{REPEATS}" in errors(f"{ACTOR}.{REPEATS}=perhaps")
    unknown = errors(f"{wrap}.min_num_parameters=3")[f"{wrap}.min_num_parameters"]
    assert f"{wrap}.min_num_params" in unknown.remedy


def test_fine_tuning_has_the_same_rules(train_file, model):
    words = [f"data.train_files={train_file}", f"model.path={model}", f"{COMPILES}=true"]
    assert load_sft_config(None, words).config.fsdp_config.use_torch_compile
    with pytest.raises(ConfigErrors) as caught:
        load_sft_config(None, [*words, "model.use_liger=true"])
    assert [error.field for error in caught.value.errors] == [COMPILES]
