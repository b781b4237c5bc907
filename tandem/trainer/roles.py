"""The worker groups of a run by the part they play, and what the loop asks of each."""

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
    """The worker groups of a run; a role that the algorithm does not need is None.

    Attributes:
        data: prompts.
        actor: trains and recomputes log-probs.
        rollout: samples; the actor's own group unless it was placed apart.
        references: the frozen policies of the KL terms, by role; a single one may be the actor's group.
        critic: values.
        reward_models: scores of models, by role.
        reward: scores of reward functions.
        batch: advantages, measures and sample files.
        scoring: makes the reward of the scores.
        scores_parts: whether reward functions may score samples before all have finished.
        rollout_shares: in how many parts the rollout divides prompts.
        resets_reference: whether the reference's weights change, and belong into checkpoints.
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
        """Every group once."""
        found = (
            self.data, self.actor, self.rollout, *self.references.values(), self.critic,
            *self.reward_models.values(), self.reward, self.batch,
        )  # fmt: skip
        return list({id(group): group for group in found if group is not None}.values())

    @property
    def reference(self) -> WorkerGroup | None:
        """The only reference, if there is one."""
        return self.references.get("ref")

    @property
    def members(self) -> Members:
        """The groups whose state goes into checkpoints."""
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
        """Draws n samples of each prompt and their scores, in the order of the prompts. Reward functions are
        called as samples finish, unless one wants to see the batch as a whole.

        Args:
            dealer: says which prompts are better sampled by the same rank.
            learns: whether the samples are learnt from.
            options: of the rollout's method.
        """
        order = dealer.order(prompts.index, self.rollout_shares)
        asked = prompts if order is None else prompts.rows(order)
        if self.reward is None or not self.scores_parts:
            samples: BatchFuture = self.rollout.generate_sequences(asked, n, params, **options)
            said = None if self.reward is None else self.reward.compute_scores(samples)
        else:
            stream: BatchStream = self.rollout.stream_sequences(asked, n, params, **options)
            said, samples = stream.map(self.reward.compute_scores), stream.all()
        if order is not None:
            back = (n * torch.argsort(order)[:, None] + torch.arange(n)).flatten()
            samples, said = samples.rows(back), None if said is None else said.rows(back)
        return samples, self.scoring.reward(samples, said, self.reward_models, self.batch, learns=learns)

    def score(self, samples: BatchFuture) -> BatchFuture:
        """The scores of samples that are there, as of those that are learnt from."""
        said = None if self.reward is None else self.reward.compute_scores(samples)
        return self.scoring.reward(samples, said, self.reward_models, self.batch, learns=True)

    def sync_rollout(self) -> None:
        """Brings the actor's weights to a rollout of its own, bucket by bucket. One is gathered while the one
        before is loaded, so that there are two at most; they go from worker to worker."""
        if self.rollout is not self.actor:
            self._send_weights(self.rollout.load_weights)

    def reset_reference(self, *, optimizer: bool) -> None:
        """Makes the reference what the actor is now; its weights go as to a rollout of its own.

        Args:
            optimizer: whether the actor's begins anew.
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
