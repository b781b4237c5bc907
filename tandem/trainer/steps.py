"""Derive the plan of a run from its config: totals, mini-batches, and which columns to recompute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tandem.algorithms.registry import AdvantageSpec, policy_loss
from tandem.config.rollout_correction import AT
from tandem.config.root import TrainConfig
from tandem.errors import ConfigError
from tandem.runtime import BatchFuture


@dataclass(frozen=True, slots=True)
class MiniBatching:
    """The settings that split a batch into the mini-batches of a role's updates.

    Attributes:
        samples: The rows of a mini-batch, over all devices.
        epochs: The number of passes over the batch.
        shuffle: Whether each pass permutes the rows.
        seed: The seed of the permutations.
    """

    samples: int
    epochs: int
    shuffle: bool
    seed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run, derived once from its config.

    Attributes:
        total_steps: The number of training steps.
        batch_samples: The rows of a batch: train_batch_size · n.
        actor: The mini-batches of the actor.
        critic: The mini-batches of the critic.
        recompute_old: Whether to compute the old log-probs (under the policy before the updates) in a
            separate forward. With one update per batch, the old log-probs equal the log-probs of the update
            itself. A separate forward is then needed only in these cases: the reward has a KL penalty; an
            advantage estimator or a token selection reads outputs of this forward; or the rollout correction
            is needed before the update (for the mean of its weights, or to hide tokens from the critic). In
            bypass mode, the rollout's log-probs replace the old log-probs.
        bypasses: Whether the rollout's log-probs replace the old log-probs.
        old_outputs: More outputs of the forward that computes the old log-probs: the sum of squared
            probabilities, the exact KL of the reward, and the entropy for files of samples.
        greedy_baselines: Whether each prompt is answered once more, greedily, for `reward_baselines`.
        exact_kl: The KL terms ("reward", "loss") that are computed exactly over the vocabulary.
        n: The number of responses per prompt.
        group_sizes: Sorted pairs: a step, and the number of responses per prompt from this step on; empty if
            all steps have n.
    """

    total_steps: int
    batch_samples: int
    actor: MiniBatching
    critic: MiniBatching
    recompute_old: bool
    bypasses: bool = False
    old_outputs: frozenset[str] = frozenset()
    greedy_baselines: bool = False
    exact_kl: frozenset[str] = frozenset()
    n: int = 1
    group_sizes: Mapping[int, int] = field(default_factory=dict)

    def at(self, step: int) -> Plan:
        """Return the plan of one step; a mini-batch has as many prompts, times the step's group size."""
        sizes = [n for first, n in self.group_sizes.items() if first <= step]
        if not sizes or sizes[-1] == self.n:
            return self
        n = sizes[-1]
        actor, critic = (
            replace(mini, samples=mini.samples // self.n * n) for mini in (self.actor, self.critic)
        )
        return replace(self, batch_samples=self.batch_samples // self.n * n, actor=actor, critic=critic, n=n)


def updates_per_step(batch_samples: int, mini: MiniBatching) -> int:
    """Return the number of optimizer steps of a role in one training step."""
    return mini.epochs * -(-batch_samples // mini.samples)


def plan_run(config: TrainConfig, spec: AdvantageSpec, steps_per_epoch: int) -> Plan:
    """Return the plan of a run.

    Args:
        config: The config of the run.
        spec: The advantage estimator.
        steps_per_epoch: The number of batches in the training set.

    Raises:
        ConfigError: Bypass mode skips the forward of the old log-probs, but another setting needs this
            forward.
    """
    actor, critic, algorithm = config.actor_rollout_ref.actor, config.critic, config.algorithm
    rollout, seed = config.actor_rollout_ref.rollout, config.trainer.seed
    n = rollout.n
    batch_samples = config.data.train_batch_size * n
    actor_mini = MiniBatching(actor.ppo_mini_batch_size * n, actor.ppo_epochs, actor.shuffle, seed)
    correction = algorithm.rollout_correction
    selection = policy_loss(actor.policy_loss.loss_mode).selection
    read = {*spec.columns, *(selection.columns if selection else ())}
    reads_old = algorithm.use_kl_in_reward or bool({"old_log_probs", "rollout_is_weights"} & read)
    before = correction.rollout_is_batch_normalize or (bool(correction.rollout_rs) and spec.needs_critic)
    of_reward = {"ref_kl"} if "reward" in config.exact_kl_terms else set()
    old_outputs = {"sum_pi_squared"} & set(spec.columns) | of_reward
    if correction.bypass_mode and old_outputs:
        raise ConfigError(
            "bypass mode skips the policy's forward before its updates, but this run needs its results",
            field=f"{AT}.bypass_mode",
            got=f"true, with {' and '.join(sorted(old_outputs))} to compute",
            expected="false",
            remedy="set it to false; or choose another algorithm.adv_estimator, and a value other than full "
            "for algorithm.kl_penalty",
        )
    return Plan(
        total_steps=config.trainer.steps(steps_per_epoch),
        batch_samples=batch_samples,
        actor=actor_mini,
        critic=MiniBatching(critic.ppo_mini_batch_size * n, critic.ppo_epochs, critic.shuffle, seed),
        recompute_old=not correction.bypass_mode
        and (updates_per_step(batch_samples, actor_mini) > 1 or reads_old or before or bool(old_outputs)),
        bypasses=correction.bypass_mode,
        old_outputs=frozenset(old_outputs | ({"entropy"} if config.trainer.samples_freq > 0 else set())),
        greedy_baselines="reward_baselines" in spec.columns,
        exact_kl=config.exact_kl_terms,
        n=n,
        group_sizes=rollout.group_sizes if rollout.n_schedule else {},
    )


def minibatches(
    batch: BatchFuture, samples: int, mini: MiniBatching, step: int, left_out: np.ndarray | None = None
) -> Iterator[BatchFuture]:
    """Yield the mini-batches of a batch in the order of the updates.

    The rows of each mini-batch are drawn from the whole batch, before the batch is split over devices. The
    batch may still be an unfinished future.

    Args:
        batch: The batch.
        samples: The number of rows in the batch.
        mini: How to cut the batch.
        step: The training step, which seeds the permutations.
        left_out: (samples) bool. Rows that no mini-batch contains. A mini-batch without rows is skipped.
    """
    for epoch in range(mini.epochs):
        rows = np.arange(samples)
        if mini.shuffle:
            np.random.default_rng([mini.seed, step, epoch]).shuffle(rows)
        for start in range(0, samples, mini.samples):
            part = rows[start : start + mini.samples]
            if left_out is not None:
                part = part[~left_out[part]]
            if len(part):
                yield batch.rows(part)
