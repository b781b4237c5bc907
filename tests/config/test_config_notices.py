"""What is deprecated or superseded works, with one sentence each."""

from __future__ import annotations

import pytest

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GRPO = ("algorithm.adv_estimator=grpo", f"{R}.n=4")


NOTICES = {
    "superseded sizes": (
        [f"{A}.use_dynamic_bsz=true", f"{A}.ppo_micro_batch_size_per_gpu=4"],
        [f"{A}.ppo_micro_batch_size_per_gpu: no effect; counts only with {A}.use_dynamic_bsz=false."],
    ),
    "superseded budget": (
        [f"{A}.ppo_max_token_len_per_gpu=9"],
        [f"{A}.ppo_max_token_len_per_gpu: no effect; counts only with {A}.use_dynamic_bsz=true."],
    ),
    "no critic": (
        [*GRPO, "critic.optim.lr=1e-4", "critic.ppo_epochs=2"],
        [
            "critic.optim.lr, critic.ppo_epochs: no effect; counts only with an algorithm.adv_estimator "
            "that has a critic."
        ],
    ),
    "no reference": (
        ["actor_rollout_ref.ref.fsdp_config.param_offload=true"],
        [
            "actor_rollout_ref.ref.fsdp_config.param_offload: no effect; counts only with "
            f"{A}.use_kl_loss=true or algorithm.use_kl_in_reward=true."
        ],
    ),
    "greedy validation": (
        ["data.val_files=${data.train_files}", f"{R}.val_kwargs.temperature=0.7"],
        [
            f"{R}.val_kwargs.temperature: no effect; counts only with {R}.val_kwargs.do_sample=true "
            "(without it validation is greedy)."
        ],
    ),
    "greedy validation several times": (
        ["data.val_files=${data.train_files}", f"{R}.val_kwargs.n=4"],
        [f"{R}.val_kwargs.n=4: greedy responses to one prompt are all the same; one would do."],
    ),
    "no validation": (
        ["data.val_batch_size=4", f"{R}.val_kwargs.temperature=0.7"],
        [
            f"{R}.val_kwargs.temperature, data.val_batch_size: no effect; counts only with data.val_files.",
        ],
    ),
    "group of one": (
        ["algorithm.adv_estimator=grpo"],
        [f"{R}.n=1: grpo compares the samples of a prompt, and there is only one."],
    ),
    "runner of another engine": (
        [f"{R}.name=hf", f"{R}.runner=module"],
        [f"{R}.runner: no effect; counts only with {R}.name=native."],
    ),
    "seed of no order": (
        ["data.shuffle=false", "data.seed=4"],
        ["data.seed: no effect; counts only with data.shuffle=true."],
    ),
}


@pytest.mark.parametrize("name", NOTICES)
def test_notice(load, name):
    overrides, notices = NOTICES[name]
    assert list(load(*overrides).notices) == notices
