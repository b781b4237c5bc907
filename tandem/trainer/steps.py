"""The plan of a run, made of its config: totals, mini-batches, which columns must be recomputed."""

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
    """The cut of a batch into a role's updates.

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
    """The plan of a run, derived from its config once.

    Attributes:
        total_steps: iterations of the loop.
        batch_samples: rows of a batch, train_batch_size · n.
        actor, critic: mini-batches of each.
        recompute_old: whether log-probs under the policy before the updates are computed. With one
            update per batch they equal the update's own, and nothing else reads them unless the
            reward is penalised by KL, the estimator or the loss's choice of tokens asks for them or for
            what comes with them, or the rollout correction must be known before the update: the mean of
            its weights, or what a critic is not to learn from. In bypass mode the rollout's stand for them.
        bypasses: whether the rollout's log-probs stand for the old ones.
        old_outputs: what the policy's forward before its updates gives besides log-probs: the sum of squared
            probabilities, the exact KL of the reward; the entropy, for the samples' files.
        greedy_baselines: whether each prompt is answered once more, greedily, for `reward_baselines`.
        exact_kl: where the KL to the reference is exact over the vocabulary, of "reward" and "loss".
        n: responses per prompt.
        group_sizes: those from a step on, by the step, in order; none where all steps have n.
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
        """The plan of one step: mini-batches count prompts, so their samples follow the group size."""
        sizes = [n for first, n in self.group_sizes.items() if first <= step]
        if not sizes or sizes[-1] == self.n:
            return self
        n = sizes[-1]
        actor, critic = (
            replace(mini, samples=mini.samples // self.n * n) for mini in (self.actor, self.critic)
        )
        return replace(self, batch_samples=self.batch_samples // self.n * n, actor=actor, critic=critic, n=n)


def updates_per_step(batch_samples: int, mini: MiniBatching) -> int:
    """Optimizer steps of a role in one training step."""
    return mini.epochs * -(-batch_samples // mini.samples)


def plan_run(config: TrainConfig, spec: AdvantageSpec, steps_per_epoch: int) -> Plan:
    """The plan of a config for a training set of `steps_per_epoch` batches.

    Raises:
        ConfigError: bypass mode, with something that the forward it leaves out would give.
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
            "bypass mode leaves out the policy's forward before its updates, which gives what is asked for",
            field=f"{AT}.bypass_mode",
            got=f"true, with {' and '.join(sorted(old_outputs))} to compute",
            expected="false",
            remedy="set it to false, or choose another algorithm.adv_estimator, and another "
            "algorithm.kl_penalty than full",
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
    """The batch's mini-batches in the order of the updates. They are formed on row numbers, over the
    whole batch, before any split over devices; nothing of the batch needs to be there yet.

    Args:
        samples: rows of the batch.
        step: the training step, for the permutations.
        left_out: (samples) bool, rows that are in no mini-batch; one without any other is left out too.
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
