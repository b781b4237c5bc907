"""Generate and score responses to prompts: for a training step, and for validation.

With dynamic sampling, a training step asks for more prompts until its batch is full of prompts whose
responses differ in reward (Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.config.root import TrainConfig
from tandem.errors import RewardError
from tandem.observability.metrics import Metrics
from tandem.protocol import SamplingParams
from tandem.runtime import BatchFuture, Future
from tandem.trainer.dealing import Dealer
from tandem.trainer.prompts import Prompts
from tandem.trainer.roles import Roles
from tandem.workers.shaping import Spread

FILTER = "algorithm.filter_groups"


class Gathered(NamedTuple):
    """The scored samples of a step.

    Attributes:
        prompts: One row per prompt.
        samples: n rows per prompt, in the order of the prompts.
        scores: The scores of the samples, in the same order.
        metrics: The metrics of dynamic sampling; empty without it.
        baselines: `reward_baselines`, one row per sample; None if not requested.
    """

    prompts: BatchFuture
    samples: BatchFuture
    scores: BatchFuture
    metrics: dict[str, float]
    baselines: tuple[BatchFuture, ...] = ()


class Gatherer:
    """Generates and scores the responses of each step.

    Without `algorithm.filter_groups`, a step uses one generation batch. With this option, prompts whose
    responses all have the same reward are left out, and generation batches follow until the training batch is
    full. Prompts that pass the filter but do not fit into the batch are returned to `prompts`. The next step
    answers these prompts first, with new responses, because the policy has changed by then. The controller
    only receives one boolean per prompt, not the samples.

    Args:
        config: The config of the run.
        prompts: Supplies more prompts, and accepts prompts back that did not fit into a batch.
        params: How responses are sampled.

    Attributes:
        dealer: Decides which rank answers which prompt.
        limit: The largest number of generation batches in a step.
    """

    def __init__(self, config: TrainConfig, prompts: Prompts, params: SamplingParams) -> None:
        self.prompts = prompts
        self.params = params
        self.dealer = Dealer()
        self._filters, self._overlong = config.algorithm.filter_groups, config.reward_model.overlong_buffer
        self._leaves_out_failed = config.leaves_out_failed
        self._size = config.data.train_batch_size
        fewest = -(-self._size // prompts.batch_size)
        self.limit = self._filters.max_num_gen_batches or max(fewest, prompts.steps_per_epoch)

    def gather(
        self, roles: Roles, prompts: BatchFuture, n: int, *, greedy_baselines: bool = False
    ) -> Gathered:
        """Return the scored samples of a step.

        Args:
            roles: The worker groups.
            prompts: The first generation batch.
            n: The number of responses to each prompt.
            greedy_baselines: Whether to answer each prompt once more, greedily, for its baseline.

        Raises:
            RewardError: The training batch was not full after `limit` generation batches.
        """
        if self._filters.enable:
            gathered = self._filled(roles, prompts, n)
        else:
            gathered = Gathered(prompts, *self._answer(roles, prompts, n), {})
        if greedy_baselines:
            gathered = gathered._replace(baselines=(self._baselines(roles, gathered.prompts, n),))
        return gathered

    def _filled(self, roles: Roles, prompts: BatchFuture, n: int) -> Gathered:
        """Return a full training batch of prompts whose responses differ in reward."""
        parts: list[tuple[BatchFuture, BatchFuture, BatchFuture]] = []
        room, reward = self._size, 0.0
        tried = dropped = tokens = 0
        failed = ["reward_failed"] if self._leaves_out_failed else []
        for number in range(1, self.limit + 1):
            samples, scores = self._answer(roles, prompts, n)
            given = scores.select("scores", "reward_extra", *failed)
            spread: Spread = roles.batch.group_spread(given, n, self._filters.metric).get()
            asked, differing = len(spread.differs), np.flatnonzero(spread.differs)
            taken, surplus = np.split(differing, [room])
            if len(taken):
                rows = (n * taken[:, None] + np.arange(n)).ravel()
                parts.append((prompts.rows(taken), samples.rows(rows), scores.rows(rows)))
            room -= len(taken)
            tried += asked
            dropped += asked - len(differing)
            reward += spread.reward * asked
            read = n * int(prompts.index.lengths["prompts"].sum())
            tokens += int(samples.index.lengths["tokens"].sum()) - read
            if not room:
                self.prompts.give_back(prompts, surplus.tolist())
                metrics = {
                    "sampling/gen_batches": float(number),
                    "sampling/dropped_groups": dropped / tried,
                    "sampling/surplus_groups": (tried - dropped - self._size) / tried,
                    "sampling/reward": reward / tried,
                    "sampling/response_tokens": float(tokens),
                }
                whole = (BatchFuture.concat(column) for column in zip(*parts, strict=True))
                prompts, samples, scores = whole
                return Gathered(prompts, samples, scores, metrics)
            if number < self.limit:
                prompts = self.prompts.next()
        raise RewardError(
            "too few prompts whose responses differ: the batch could not be filled",
            field=f"{FILTER}.max_num_gen_batches",
            got=f"{self._size - room} of {self._size} prompts after {self.limit} generation batches; "
            f"mean reward {reward / tried:.4g}, {dropped} of {tried} prompts had responses of the same "
            f"{self._filters.metric}",
            expected=f"{self._size} prompts, data.train_batch_size",
            remedy="if the model answers all prompts alike, little is left to learn: use other data, more "
            f"responses per prompt, or a smaller data.train_batch_size; {FILTER}.max_num_gen_batches allows "
            "more tries",
        )

    def _answer(self, roles: Roles, prompts: BatchFuture, n: int) -> tuple[BatchFuture, BatchFuture]:
        """Sample n responses to each prompt, score the responses, and pass the scores to the sampler."""
        samples, scores = roles.generate(prompts, n, self.params, self.dealer, learns=True)
        scores = self.shaped(roles, samples, scores)
        self.prompts.observe(samples, scores)
        return samples, scores

    def shaped(self, roles: Roles, samples: BatchFuture, scores: BatchFuture) -> BatchFuture:
        """Return the scores for training: replace failed scores, and subtract the length penalty."""
        if self._leaves_out_failed:
            given = samples.select("response_mask", "uid").union(scores)
            found: BatchFuture = roles.batch.stand_in(given)
            kept = set(scores.index.columns) - {"scores", "token_level_scores"}
            scores = scores.select(*kept).union(found)
        return self._punished(roles, samples, scores)

    def _punished(self, roles: Roles, samples: BatchFuture, scores: BatchFuture) -> BatchFuture:
        """Subtract the length penalty from the scores, if the config sets a length penalty."""
        overlong = self._overlong
        if not overlong.enable:
            return scores
        assert overlong.len is not None, "the config requires a length if the penalty is enabled"
        punished: BatchFuture = roles.batch.punish_overlong(
            samples.select("response_mask").union(scores),
            self.params.max_tokens,
            overlong.len,
            overlong.penalty_factor,
            overlong.log,
        )
        return punished

    def _baselines(self, roles: Roles, prompts: BatchFuture, n: int) -> BatchFuture:
        """Return `reward_baselines`: the total reward of the greedy response to each prompt.

        The greedy response has the same limits, sampling penalties and length penalty as the samples. Each
        value is repeated n times, once for each of the prompt's n samples. The timing is `gen_max`.
        """
        greedy = replace(self.params, temperature=0.0)
        samples, scores = roles.generate(prompts, 1, greedy, self.dealer, phase="gen_max")
        scores = self._punished(roles, samples, scores)
        beside = torch.arange(len(prompts)).repeat_interleave(n)
        found: BatchFuture = roles.batch.reward_baselines(scores.select("scores").rows(beside))
        return found


@dataclass(frozen=True)
class Evaluator:
    """Answers and scores the validation set.

    Attributes:
        batches: The number of validation batches.
        n: The number of samples per prompt.
        params: How responses are sampled.
        writes_samples: Whether to write the samples to the run folder.
        shown: The number of samples that are sent to loggers as text.
        dealer: Decides which rank answers which prompt.
    """

    batches: int
    n: int
    params: SamplingParams
    writes_samples: bool
    shown: int = 0
    dealer: Dealer = field(default_factory=Dealer)

    def run(self, step: int, roles: Roles) -> dict[str, float]:
        """Return `val/accuracy` and `val/reward`, over all problems and per data source."""
        measured: list[Future[Metrics]] = []
        written: list[Future[Any]] = []
        answered: list[tuple[BatchFuture, BatchFuture]] = []
        for number in range(self.batches):
            prompts = roles.data.val_batch(number)
            samples, scores = roles.generate(prompts, self.n, self.params, self.dealer)
            answered.append((prompts, samples))
            batch = samples.union(scores)
            measured.append(roles.batch.measure_validation(batch))
            if self.writes_samples:
                written.append(roles.batch.write_samples(step, batch, part=f"val{number or ''}"))
        metrics = Metrics.merged(future.get() for future in measured).to_floats()
        for future in written:
            future.get()
        for prompts, samples in answered:
            self.dealer.learn(prompts.index, samples.index)
        return metrics
