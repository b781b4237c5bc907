"""Deprecated or superseded keys work, and each gives one sentence."""

from __future__ import annotations

import pytest

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
GRPO = ("algorithm.adv_estimator=grpo", f"{R}.n=4")


NOTICES = {
    "superseded sizes": (
        [f"{A}.use_dynamic_bsz=true", f"{A}.ppo_micro_batch_size_per_gpu=4"],
        [f"{A}.ppo_micro_batch_size_per_gpu: no effect; used only if {A}.use_dynamic_bsz=false."],
    ),
    "superseded budget": (
        [f"{A}.ppo_max_token_len_per_gpu=9"],
        [f"{A}.ppo_max_token_len_per_gpu: no effect; used only if {A}.use_dynamic_bsz=true."],
    ),
    "no critic": (
        [*GRPO, "critic.optim.lr=1e-4", "critic.ppo_epochs=2"],
        [
            "critic.optim.lr, critic.ppo_epochs: no effect; used only if algorithm.adv_estimator "
            "uses a critic."
        ],
    ),
    "no reference": (
        ["actor_rollout_ref.ref.fsdp_config.param_offload=true"],
        [
            "actor_rollout_ref.ref.fsdp_config.param_offload: no effect; used only if "
            f"{A}.use_kl_loss=true or algorithm.use_kl_in_reward=true."
        ],
    ),
    "greedy validation": (
        ["data.val_files=${data.train_files}", f"{R}.val_kwargs.temperature=0.7"],
        [
            f"{R}.val_kwargs.temperature: no effect; used only if {R}.val_kwargs.do_sample=true "
            "(otherwise validation is greedy)."
        ],
    ),
    "greedy validation several times": (
        ["data.val_files=${data.train_files}", f"{R}.val_kwargs.n=4"],
        [f"{R}.val_kwargs.n=4: greedy responses to one prompt are all identical, so one is enough."],
    ),
    "no validation": (
        ["data.val_batch_size=4", f"{R}.val_kwargs.temperature=0.7"],
        [
            f"{R}.val_kwargs.temperature, data.val_batch_size: no effect; used only if "
            "data.val_files is set.",
        ],
    ),
    "group of one": (
        ["algorithm.adv_estimator=grpo"],
        [f"{R}.n=1: grpo compares the samples of a prompt, and there is only one."],
    ),
    "runner of another engine": (
        [f"{R}.name=hf", f"{R}.runner=module"],
        [f"{R}.runner: no effect; used only if {R}.name=native."],
    ),
    "fused in another library": (
        [f"{A}.optim.optimizer=adamw_8bit", f"{A}.optim.fused=false"],
        [f"{A}.optim.fused: no effect; used only if {A}.optim.optimizer is not adamw_8bit."],
    ),
    "offload of what is on the host": (
        ["critic.optim.optimizer=adamw_cpu", "critic.fsdp_config.optimizer_offload=true"],
        [
            "critic.fsdp_config.optimizer_offload: no effect; used only if "
            "critic.optim.optimizer is not adamw_cpu, whose state is always in host memory."
        ],
    ),
    "schedule by its old name": (
        [f"{A}.optim.warmup_style=cosine"],
        [f"{A}.optim.warmup_style is {A}.optim.lr_scheduler_type=cosine here."],
    ),
    "head's kernels unused": (
        [f"{MODEL}.fused_kernel_options.impl_backend=triton"],
        [
            f"{MODEL}.fused_kernel_options.impl_backend: no effect; used only if "
            f"{MODEL}.use_fused_kernels=true."
        ],
    ),
    "fused head on a CPU": (
        [f"{MODEL}.use_fused_kernels=true", "trainer.device=cpu"],
        [
            f"{MODEL}.use_fused_kernels=true: no effect; on a CPU, the head uses PyTorch operators in any "
            "case."
        ],
    ),
    "fused head where it may count": ([f"{MODEL}.use_fused_kernels=true"], []),
    "PyTorch's head where Triton's may be": (
        [f"{MODEL}.use_fused_kernels=true", f"{MODEL}.fused_kernel_options.impl_backend=torch"],
        [],
    ),
    "entropy in chunks": (
        ["actor_rollout_ref.ref.entropy_from_logits_with_chunking=True"],
        [
            "actor_rollout_ref.ref.entropy_from_logits_with_chunking: ignored: the head always "
            "processes the vocabulary in tiles and never holds all logits at once."
        ],
    ),
    "entropy not computed again": (
        [f"{A}.entropy_checkpointing=false"],
        [
            f"{A}.entropy_checkpointing: ignored: the backward pass always recomputes the logits "
            "tile by tile, unless there are only few."
        ],
    ),
    "seed of no order": (
        ["data.shuffle=false", "data.seed=4"],
        ["data.seed: no effect; used only if data.shuffle=true."],
    ),
}


@pytest.mark.parametrize("name", NOTICES)
def test_notice(load, name):
    overrides, notices = NOTICES[name]
    assert list(load(*overrides).notices) == notices
