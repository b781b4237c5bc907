"""Errors about several reward models and several references.

Each error names its key, what is wrong, what is expected and the remedy.
"""

from __future__ import annotations

import pytest

A = "actor_rollout_ref.actor"
SCORED = ("reward_model.enable=true", "reward_model.model.path=${actor_rollout_ref.model.path}")

WRONG = {
    "one reward model and several": (
        [*SCORED, "reward_model.models={a: {path: '${actor_rollout_ref.model.path}'}}"],
        "reward_model.model.path",
        "together with reward_model.models",
        "either reward_model.model.path or reward_model.models",
        "move this model to reward_model.models",
    ),
    "folder of one of several reward models": (
        ["reward_model.enable=true", "reward_model.models={a: {path: /nowhere}}"],
        "reward_model.models.a.path",
        "does not exist",
        "a Hugging Face folder with config.json",
        "OWNER/NAME",
    ),
    "several reward models, not enabled": (
        ["reward_model.models={a: {path: /nowhere}}"],
        "reward_model.models",
        "has no effect",
        "set only if reward_model.enable=true",
        "remove this key",
    ),
    "a reward model of no name": (
        ["reward_model.enable=true", "reward_model.models={a/b: {path: '${actor_rollout_ref.model.path}'}}"],
        "reward_model.models.a/b",
        "not a valid name",
        "starting with a letter",
        None,
    ),
    "normalised scores of steps": (
        [
            "reward_model.enable=true",
            "reward_model.models={a: {path: '${actor_rollout_ref.model.path}', step_separator: x, "
            "normalize: true}}",
        ],
        "reward_model.models.a.normalize",
        "scores of single steps",
        None,
        "remove it",
    ),
    "what steps make together, without steps": (
        [
            "reward_model.enable=true",
            "reward_model.models={a: {path: '${actor_rollout_ref.model.path}', step_score: min}}",
        ],
        "reward_model.models.a.step_score",
        "has no effect",
        "set only if step_separator",
        "remove this entry",
    ),
    "a reward model named as a function": (
        [
            "reward_model.enable=true",
            "reward_model.models={right: {path: '${actor_rollout_ref.model.path}'}}",
            "custom_reward_function.path=my.rewards",
            "custom_reward_function.name=right",
        ],
        "reward_model.models.right",
        "the same name",
        None,
        "a different name",
    ),
    "weights beside a function that combines": (
        [*SCORED, "reward.weight=0.5", "reward.combine=my.rewards:least"],
        "reward.combine",
        "weights have no effect",
        None,
        "apply the weights in the function",
    ),
    "weight of functions without a model": (
        ["reward.weight=0.5"],
        "reward.weight",
        "has no effect",
        "set only if reward_model.enable=true",
        "remove this key",
    ),
    "folder of one of several references": (
        [f"{A}.use_kl_loss=true", "actor_rollout_ref.ref.models={old: {path: /nowhere}}"],
        "actor_rollout_ref.ref.models.old.path",
        "does not exist",
        "a Hugging Face folder with config.json",
        "OWNER/NAME",
    ),
    "several references, one of which is reset": (
        [f"{A}.use_kl_loss=true", "actor_rollout_ref.ref={models: {a: {}, b: {}}, reset_interval: 5}"],
        "actor_rollout_ref.ref.reset_interval",
        "only a single reference can be reset",
        "0",
        "set it to 0, or remove actor_rollout_ref.ref.models",
    ),
    "exact KL to several references": (
        [f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=full", "actor_rollout_ref.ref.models={a: {}, b: {}}"],
        "actor_rollout_ref.ref.models",
        "there are several references",
        "an estimator such as k3+ instead of full",
        "remove actor_rollout_ref.ref.models, or change algorithm.kl_penalty and "
        "actor_rollout_ref.actor.kl_loss_type",
    ),
    "role of a model that is not there": (
        [f"{A}.use_kl_loss=true", "trainer.placement={ref.old: global_pool}"],
        "trainer.placement.ref.old",
        "unknown role",
        "one of actor_rollout, actor, rollout, ref, critic, reward_model, reward",
        "did you mean ref?",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(errors, name):
    overrides, field, message, expected, remedy = WRONG[name]
    found = errors(*overrides)
    assert list(found) == [field]
    error = found[field]
    for text, given in ((message, error.message), (expected, error.expected), (remedy, error.remedy)):
        assert (text is None) == (given is None)
        assert text is None or text in given
