"""What follows from the config for each step: totals, mini-batches, what must be recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tandem.algorithms.registry import AdvantageSpec
from tandem.config.root import TrainConfig
from tandem.runtime import BatchFuture


@dataclass(frozen=True, slots=True)
class MiniBatching:
    """How a role's updates cut a batch.

    Attributes:
        samples: rows of a mini-batch, over all devices.
        epochs: passes over the batch.
        shuffle: whether each pass permutes the rows.
        seed: of those permutations.
    """

    samples: int
    epochs: int
    shuffle: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does, derived from its config once.

    Attributes:
        total_steps: iterations of the loop.
        batch_samples: rows of a batch, train_batch_size · n.
        actor, critic: mini-batches of each.
        devices: processes that compute.
        use_reference: whether a KL term needs the reference policy.
        use_critic: whether the estimator needs values.
        recompute_old: whether log-probs under the policy before the updates are computed. With one
            update per batch they equal the update's own, and nothing else reads them unless the
            reward is penalised by KL or the estimator asks for them.
    """

    total_steps: int
    batch_samples: int
    actor: MiniBatching
    critic: MiniBatching
    devices: int
    use_reference: bool
    use_critic: bool
    recompute_old: bool


def updates_per_step(batch_samples: int, mini: MiniBatching) -> int:
    """Optimizer steps of a role in one training step."""
    return mini.epochs * -(-batch_samples // mini.samples)


def plan_run(config: TrainConfig, spec: AdvantageSpec, steps_per_epoch: int) -> Plan:
    """The plan of a config for a training set of `steps_per_epoch` batches."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    n, seed = config.actor_rollout_ref.rollout.n, config.trainer.seed
    batch_samples = config.data.train_batch_size * n
    actor_mini = MiniBatching(actor.ppo_mini_batch_size * n, actor.ppo_epochs, actor.shuffle, seed)
    in_reward = config.algorithm.use_kl_in_reward
    return Plan(
        total_steps=config.trainer.total_training_steps or config.trainer.total_epochs * steps_per_epoch,
        batch_samples=batch_samples,
        actor=actor_mini,
        critic=MiniBatching(critic.ppo_mini_batch_size * n, critic.ppo_epochs, critic.shuffle, seed),
        devices=config.trainer.world_size,
        use_reference=in_reward or actor.use_kl_loss or "ref_log_probs" in spec.columns,
        use_critic="values" in spec.columns,
        recompute_old=(
            updates_per_step(batch_samples, actor_mini) > 1 or in_reward or "old_log_probs" in spec.columns
        ),
    )


def minibatches(batch: BatchFuture, mini: MiniBatching, step: int) -> Iterator[BatchFuture]:
    """The batch's mini-batches in the order of the updates. They are formed on row numbers, over the
    whole batch, before any split over devices."""
    for epoch in range(mini.epochs):
        rows = np.arange(len(batch))
        if mini.shuffle:
            np.random.default_rng([mini.seed, step, epoch]).shuffle(rows)
        for start in range(0, len(rows), mini.samples):
            yield batch.rows(rows[start : start + mini.samples].tolist())


def throughput(seconds: Mapping[str, float], metrics: Mapping[str, float], plan: Plan) -> dict[str, float]:
    """Timings and rates under the field's names.

    Args:
        seconds: `timing/PHASE` to seconds of one step.
        metrics: of the same step; `tokens/total` and `tokens/response` are read.
        plan: of the run.
    """
    passes = {"update_actor": plan.actor.epochs, "update_critic": plan.critic.epochs}
    counts = {"total": metrics["tokens/total"], "response": metrics["tokens/response"]}
    out = dict(seconds)
    for phase, kind in _TOKENS_OF_PHASE.items():
        taken = seconds.get(f"timing/{phase}")
        if taken:
            tokens = counts[kind] * passes.get(phase, 1)
            out[f"timing_per_token_ms/{phase}"] = 1000 * taken / max(tokens, 1)
            if phase in _RATES:
                out[f"perf/{_RATES[phase]}_tokens_per_s_per_device"] = tokens / taken / plan.devices
    out["perf/step_tokens_per_s"] = counts["total"] / seconds["timing/step"]
    return out


_RATES = {"gen": "gen", "old_log_prob": "log_prob", "update_actor": "train"}
_TOKENS_OF_PHASE = {
    "gen": "response",
    "old_log_prob": "total",
    "ref": "total",
    "values": "total",
    "adv": "total",
    "update_critic": "total",
    "update_actor": "total",
}
