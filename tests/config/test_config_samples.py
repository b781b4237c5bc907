"""Keys that decide which samples are learned from: what is refused, and why."""

from __future__ import annotations

import pytest

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FILTER, OVERLONG, SAMPLER = "algorithm.filter_groups", "reward_model.overlong_buffer", "data.sampler"
ENTROPY = f"{A}.adaptive_entropy"
GROUPS = (f"{R}.n=4", f"{FILTER}.enable=true")

REFUSED = {
    "groups of one": (
        (f"{FILTER}.enable=true",), f"{FILTER}.enable", "a single response", f"{R}.n=8",
    ),
    "groups of one later": (
        (*GROUPS, f"{R}.n_schedule={{5: 1}}"), f"{FILTER}.enable", "a single response", f"{R}.n=8",
    ),
    "filtered by the KL": (
        (*GROUPS, f"{FILTER}.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"),
        f"{FILTER}.metric", "with the KL in the reward", f"{FILTER}.metric=seq_reward",
    ),
    "never full": (
        (*GROUPS, f"{FILTER}.max_num_gen_batches=3", "data.gen_batch_size=300"),
        f"{FILTER}.max_num_gen_batches", "never fill", "data.gen_batch_size",
    ),
    "no buffer": ((f"{OVERLONG}.enable=true",), f"{OVERLONG}.len", "missing", f"{OVERLONG}.len=102"),
    "longer than a response": (
        (f"{OVERLONG}.enable=true", f"{OVERLONG}.len=513"), f"{OVERLONG}.len", "longer than", "=102",
    ),
    "no punishment": (
        (f"{OVERLONG}.enable=true", f"{OVERLONG}.len=5", f"{OVERLONG}.penalty_factor=0"),
        f"{OVERLONG}.penalty_factor", "out of range", "",
    ),
    "all are cut": (
        ("algorithm.mask_truncated_completions=true", f"{R}.ignore_eos=true"),
        "algorithm.mask_truncated_completions", "every response would be cut", f"{R}.ignore_eos=false",
    ),
    "step zero": ((f"{R}.n_schedule={{0: 4}}",), f"{R}.n_schedule", "out of range", "{1: 4, 100: 8}"),
    "no responses": ((f"{R}.n_schedule={{3: 0}}",), f"{R}.n_schedule", "out of range", "{1: 4, 100: 8}"),
    "rloo of one": (
        ("algorithm.adv_estimator=rloo", f"{R}.n=4", f"{R}.n_schedule={{9: 1}}"),
        f"{R}.n_schedule", "only one", "raise it",
    ),
    "a file without a class": (
        (f"{SAMPLER}.class_path=mine.py",), f"{SAMPLER}.class_path", "no class", f"{SAMPLER}.class_name",
    ),
    "does not exist": (
        (f"{SAMPLER}.class_path=mine.py", f"{SAMPLER}.class_name=Mine"),
        f"{SAMPLER}.class_path", "does not exist", "check the path",
    ),
    "bounds the wrong way round": (
        (f"{ENTROPY}.enabled=true", f"{ENTROPY}.min_ent_coef=0.01"),
        f"{ENTROPY}.min_ent_coef", "above the upper bound", "raise the upper bound",
    ),
    "outside the bounds": (
        (f"{ENTROPY}.enabled=true", f"{A}.entropy_coeff=0.1"),
        f"{A}.entropy_coeff", "outside its bounds", f"{A}.entropy_coeff=0.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(errors, name):
    overrides, field, message, remedy = REFUSED[name]
    found = errors(*overrides)
    assert set(found) == {field}
    assert message in found[field].message
    assert remedy in (found[field].remedy or "")
    assert found[field].expected or found[field].got


NO_EFFECT = {
    "data.gen_batch_size=8": f"set only if {FILTER}.enable=true",
    f"{FILTER}.metric=score": f"set only if {FILTER}.enable=true",
    f"{OVERLONG}.log=true": f"set only if {OVERLONG}.enable=true",
    f"{ENTROPY}.target_entropy=0.1": f"set only if {ENTROPY}.enabled=true",
    f"{SAMPLER}.kwargs={{floor: 0.1}}": f"set only if {SAMPLER}.class_name is set",
}


@pytest.mark.parametrize("override", NO_EFFECT)
def test_a_setting_that_changes_nothing_is_an_error(errors, override):
    (error,) = errors(override).values()
    assert error.field == override.split("=")[0]
    assert (error.message, error.expected) == ("has no effect", NO_EFFECT[override])


def test_the_order_is_the_samplers_where_there_is_one(errors):
    (error,) = errors(f"{SAMPLER}.class_name=PassRateSampler", "data.shuffle=false").values()
    assert (error.field, error.message) == ("data.shuffle", "has no effect")


@pytest.mark.parametrize(
    "overrides",
    [
        (*GROUPS, "data.gen_batch_size=1536", f"{FILTER}.max_num_gen_batches=10", f"{FILTER}.metric=acc"),
        (f"{OVERLONG}.enable=true", f"{OVERLONG}.len=512", f"{OVERLONG}.log=true"),
        ("algorithm.mask_truncated_completions=true", f"{R}.ignore_eos=true", f"{R}.stop=end"),
        (f"{R}.n_schedule={{1: 4, 100: 8}}",),
        (f"{SAMPLER}.class_name=PassRateSampler", f"{SAMPLER}.kwargs={{floor: 0.1}}"),
        (f"{ENTROPY}.enabled=true", f"{ENTROPY}.delta_ent_coef=0.005", f"{A}.entropy_coeff=0.001"),
    ],
)
def test_right_settings_pass_without_a_word(load, overrides):
    assert load(*overrides).notices == ()


def test_the_schedule_is_in_the_order_of_its_steps(load):
    rollout = load(f"{R}.n=2", f"{R}.n_schedule={{100: 8, 5: 4}}").config.actor_rollout_ref.rollout
    assert list(rollout.group_sizes.items()) == [(1, 2), (5, 4), (100, 8)]
    dotted = load(f"{R}.n_schedule.7=3").config.actor_rollout_ref.rollout
    assert dotted.group_sizes == {1: 1, 7: 3}


def test_the_punishment_by_its_other_name_is_understood(load):
    name = "reward_model.reward_kwargs.overlong_buffer_cfg"
    words = [f"{name}.enable=true", f"{name}.len=100", f"{name}.penalty_factor=1.0"]
    loaded = load(*words, "reward_model.reward_manager=dapo")
    buffer = loaded.config.reward_model.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 100, 1.0)
    assert [f" is {OVERLONG}." in notice for notice in loaded.notices] == [True, True, True, False]
