"""What follows from the config for each step: totals, mini-batches, what must be recomputed."""

from __future__ import annotations

from collections.abc import Iterator
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
        recompute_old: whether log-probs under the policy before the updates are computed. With one
            update per batch they equal the update's own, and nothing else reads them unless the
            reward is penalised by KL or the estimator asks for them.
    """

    total_steps: int
    batch_samples: int
    actor: MiniBatching
    critic: MiniBatching
    recompute_old: bool


def updates_per_step(batch_samples: int, mini: MiniBatching) -> int:
    """Optimizer steps of a role in one training step."""
    return mini.epochs * -(-batch_samples // mini.samples)


def played_roles(config: TrainConfig, spec: AdvantageSpec) -> frozenset[str]:
    """The roles of a run besides its helpers: the reference if a KL term or the estimator needs it, the
    critic if the estimator needs values, a reward model or reward functions."""
    roles = {"actor", "rollout", "reward_model" if config.reward_model.enable else "reward"}
    if config.needs_reference or "ref_log_probs" in spec.columns:
        roles.add("ref")
    if "values" in spec.columns:
        roles.add("critic")
    return frozenset(roles)


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
        recompute_old=(
            updates_per_step(batch_samples, actor_mini) > 1 or in_reward or "old_log_probs" in spec.columns
        ),
    )


def minibatches(batch: BatchFuture, samples: int, mini: MiniBatching, step: int) -> Iterator[BatchFuture]:
    """The batch's mini-batches in the order of the updates. They are formed on row numbers, over the
    whole batch, before any split over devices; nothing of the batch needs to be there yet.

    Args:
        samples: rows of the batch.
        step: the training step, for the permutations.
    """
    for epoch in range(mini.epochs):
        rows = np.arange(samples)
        if mini.shuffle:
            np.random.default_rng([mini.seed, step, epoch]).shuffle(rows)
        for start in range(0, samples, mini.samples):
            yield batch.rows(rows[start : start + mini.samples])
