"""The worker groups of a run, and the operations of the training loop that involve several groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandem.protocol import SamplingParams
from tandem.runtime import BatchFuture, BatchStream, Future, WorkerGroup
from tandem.trainer.dealing import Dealer
from tandem.trainer.saving import Members, ReferenceMember
from tandem.trainer.scoring import Scoring


@dataclass(frozen=True)
class Roles:
    """The worker groups of a run. A role that the algorithm does not need is None.

    Attributes:
        data: Reads prompts.
        actor: Trains the policy and recomputes log-probs.
        rollout: Generates samples. It is the actor's group unless the config places it separately.
        references: A dict from role to a frozen policy of a KL term. A single reference may be the actor's
            group.
        critic: Computes values.
        reward_models: A dict from role to a group that scores samples with a reward model.
        reward: Scores samples with reward functions.
        batch: Computes advantages and metrics of whole batches, and writes files of samples.
        scoring: Computes the reward from the scores.
        scores_parts: Whether reward functions may score samples before all samples are finished.
        rollout_shares: The number of rollout ranks among which prompts are divided.
        resets_reference: Whether the reference's weights change, so that checkpoints must store them.
    """

    data: WorkerGroup
    actor: WorkerGroup
    rollout: WorkerGroup
    references: Mapping[str, WorkerGroup]
    critic: WorkerGroup | None
    reward_models: Mapping[str, WorkerGroup]
    reward: WorkerGroup | None
    batch: WorkerGroup
    scoring: Scoring
    scores_parts: bool
    rollout_shares: int = 1
    resets_reference: bool = False

    @property
    def groups(self) -> list[WorkerGroup]:
        """All groups, without duplicates."""
        found = (
            self.data, self.actor, self.rollout, *self.references.values(), self.critic,
            *self.reward_models.values(), self.reward, self.batch,
        )  # fmt: skip
        return list({id(group): group for group in found if group is not None}.values())

    @property
    def reference(self) -> WorkerGroup | None:
        """The reference, if the run has exactly one; else None."""
        return self.references.get("ref")

    @property
    def members(self) -> Members:
        """The groups whose state checkpoints store."""
        found: dict[str, WorkerGroup | ReferenceMember] = {"actor": self.actor}
        if self.critic:
            found["critic"] = self.critic
        if self.resets_reference:
            found["ref"] = ReferenceMember(self.reference)
        return found

    def generate(
        self,
        prompts: BatchFuture,
        n: int,
        params: SamplingParams,
        dealer: Dealer,
        *,
        learns: bool = False,
        **options: Any,
    ) -> tuple[BatchFuture, BatchFuture]:
        """Generate and score n samples of each prompt. The rows are in the order of the prompts.

        Reward functions are called as samples finish, unless a function needs the whole batch.

        Args:
            prompts: The prompts.
            n: The number of samples of each prompt.
            params: How samples are drawn.
            dealer: Decides which rank answers which prompt.
            learns: Whether the run learns from the samples.
            options: More keyword arguments of the rollout's method.

        Returns:
            The samples and their scores.
        """
        order = dealer.order(prompts.index, self.rollout_shares)
        asked = prompts if order is None else prompts.rows(order)
        if self.reward is None or not self.scores_parts:
            samples: BatchFuture = self.rollout.generate_sequences(asked, n, params, **options)
            function_scores = None if self.reward is None else self.reward.compute_scores(samples)
        else:
            stream: BatchStream = self.rollout.stream_sequences(asked, n, params, **options)
            function_scores, samples = stream.map(self.reward.compute_scores), stream.all()
        if order is not None:
            back = (n * torch.argsort(order)[:, None] + torch.arange(n)).flatten()
            samples, function_scores = (
                samples.rows(back),
                None if function_scores is None else function_scores.rows(back),
            )
        return samples, self.scoring.reward(
            samples, function_scores, self.reward_models, self.batch, learns=learns
        )

    def score(self, samples: BatchFuture) -> BatchFuture:
        """Score existing samples as in training."""
        function_scores = None if self.reward is None else self.reward.compute_scores(samples)
        return self.scoring.reward(samples, function_scores, self.reward_models, self.batch, learns=True)

    def sync_rollout(self) -> None:
        """Copy the actor's weights to the rollout, if the rollout has a separate group.

        Weights go from worker to worker in buckets. One bucket is gathered while the previous bucket is
        loaded, so at most two buckets exist at a time.
        """
        if self.rollout is not self.actor:
            self._send_weights(self.rollout.load_weights)

    def reset_reference(self, *, optimizer: bool) -> None:
        """Copy the actor's weights to the reference, in the same way as `sync_rollout`.

        Args:
            optimizer: Whether to reset the actor's optimizer as well.
        """
        assert self.reference is not None
        self._send_weights(self.reference.load_reference)
        if optimizer:
            self.actor.reset_optimizer()

    def _send_weights(self, load: Callable[[Future[Any]], None]) -> None:
        count: int = self.actor.weight_buckets()
        following: Future[Any] = self.actor.export_weights(0)
        for number in range(1, count + 1):
            bucket = following
            if number < count:
                following = self.actor.export_weights(number)
            load(bucket)
