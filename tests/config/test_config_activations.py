"""The keys of activation memory: which combinations are valid and which are refused."""

from __future__ import annotations

import pytest

from tandem.config.load import load_sft_config
from tandem.errors import ConfigErrors

M = "actor_rollout_ref.model"
MODE, LAYERS, OPS = (f"{M}.gradient_checkpointing_{name}" for name in ("mode", "layers", "ops"))
OFFLOAD, COPIES = f"{M}.enable_activation_offload", f"{M}.activation_offload_mode"

# overrides: (field, part of the message, got, part of expected, part of the remedy)
WRONG = {
    (f"{LAYERS}=4",): (
        LAYERS,
        "has no effect",
        4,
        f"set only if {MODE}=first or every",
        "remove this key",
    ),
    (f"{MODE}=ops", f"{LAYERS}=4"): (
        LAYERS,
        "has no effect",
        4,
        f"set only if {MODE}=first or every",
        "remove this key",
    ),
    (f"{OPS}=[matmul]",): (
        OPS,
        "has no effect",
        ("matmul",),
        f"set only if {MODE}=ops",
        "remove this key",
    ),
    (f"{M}.enable_gradient_checkpointing=false", f"{MODE}=ops"): (
        MODE,
        "has no effect",
        "ops",
        f"set only if {M}.enable_gradient_checkpointing=true",
        "remove this key",
    ),
    (f"{COPIES}=sync",): (
        COPIES,
        "has no effect",
        "sync",
        f"set only if {OFFLOAD}=true",
        "remove this key",
    ),
    (f"{MODE}=first",): (LAYERS, "missing", None, "the number of layers", f"set {LAYERS}, or {MODE}=full"),
    (f"{MODE}=every",): (
        LAYERS,
        "missing",
        None,
        "one layer in every N",
        f"set {LAYERS}, or {MODE}=full",
    ),
    (f"{MODE}=every", f"{LAYERS}=1"): (
        LAYERS,
        "every layer",
        1,
        ">= 2",
        f"set {MODE}=full and remove this key",
    ),
    (f"{MODE}=first", f"{LAYERS}=0"): (LAYERS, "out of range", "0", "integer >= 1, or null", None),
    (f"{MODE}=ops", f"{OPS}=[]"): (
        OPS,
        "the list is empty",
        "nothing",
        "at least one operator",
        f"set {MODE}=full and remove this key",
    ),
    (f"{MODE}=ops", f"{OPS}=[matmul, atention]"): (
        OPS,
        "unknown operator",
        "atention",
        "matmul, attention, or namespace.operator, such as aten.mm",
        "did you mean attention?",
    ),
    (f"{MODE}=some",): (MODE, "unknown value", "some", "one of auto, full, first, every, ops", None),
    (f"{OFFLOAD}=true", f"{COPIES}=asynch"): (
        COPIES,
        "unknown value",
        "asynch",
        "one of async, sync",
        "did you mean async?",
    ),
    ("reward_model.model.enable_activation_offload=true",): (
        "reward_model.model.enable_activation_offload",
        "has no effect",
        True,
        "set only if the model is trained",
        "remove this key",
    ),
}


@pytest.mark.parametrize("overrides", WRONG, ids=" ".join)
def test_refused(errors, overrides):
    (error,) = errors(*overrides).values()
    field, message, got, expected, remedy = WRONG[overrides]
    assert error.field == field
    for text, given in ((message, error.message), (expected, error.expected), (remedy, error.remedy)):
        assert (text is None) == (given is None)
        assert text is None or text in given
    assert str(error.got).strip('"') == str(got)


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{MODE}=first", f"{LAYERS}=1"),
        (f"{MODE}=every", f"{LAYERS}=2", f"{OFFLOAD}=true"),
        (f"{MODE}=ops",),
        (f"{MODE}=ops", f"{OPS}=[attention, aten.mm]"),
        (f"{M}.enable_gradient_checkpointing=false", f"{OFFLOAD}=true", f"{COPIES}=sync"),
        ("critic.model.enable_activation_offload=true",),
    ],
    ids=" ".join,
)
def test_right_combinations_pass_without_a_word(load, overrides):
    assert load(*overrides).notices == ()


def test_defaults_are_those_of_the_field(load):
    for model in (load().config.actor_rollout_ref.model, load().config.critic.model):
        assert model.enable_gradient_checkpointing and model.gradient_checkpointing_mode == "auto"
        assert not model.enable_activation_offload and model.activation_offload_mode == "async"


def test_the_critic_and_fine_tuning_have_the_same_rules(errors, train_file, model):
    assert set(errors("critic.model.gradient_checkpointing_layers=4")) == {
        "critic.model.gradient_checkpointing_layers"
    }
    words = [f"data.train_files={train_file}", f"model.path={model}"]
    assert load_sft_config(None, [*words, "model.enable_activation_offload=true"]).config.model
    with pytest.raises(ConfigErrors) as caught:
        load_sft_config(None, [*words, "model.gradient_checkpointing_mode=first"])
    assert [error.field for error in caught.value.errors] == ["model.gradient_checkpointing_layers"]
