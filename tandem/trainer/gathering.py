"""Prompts answered and scored: those of a training step, and further ones until its batch is full of prompts
that teach something (dynamic sampling: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2); and those of the
validation set."""

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
    """The samples of a step, scored.

    Attributes:
        prompts: one row per prompt.
        samples, scores: n rows per prompt, in the order of the prompts.
        metrics: of the sampling, where there is a choice.
        baselines: `reward_baselines`, as many rows, if they were asked for.
    """

    prompts: BatchFuture
    samples: BatchFuture
    scores: BatchFuture
    metrics: dict[str, float]
    baselines: tuple[BatchFuture, ...] = ()


class Gatherer:
    """Answers and scores the prompts of each step.

    Without `algorithm.filter_groups` that is one generation batch. With it, prompts whose responses are all
    worth the same are left out, and generation batches follow until the batch is full. Prompts that differ
    and find no room are not learnt from now, for their responses would be an older policy's in the next step:
    they are given back, and answered again first thing then. What the controller sees of the samples is a
    truth value per prompt.

    Args:
        config: of the run.
        prompts: gives further prompts, and takes back those there was no room for.
        params: how responses are drawn.

    Attributes:
        dealer: says which prompts are better sampled by the same rank.
        limit: the most generation batches of a step.
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
        """The samples of a step.

        Args:
            prompts: the first generation batch.
            n: responses to each.
            greedy_baselines: whether each prompt is answered once more, greedily, for its baseline.

        Raises:
            RewardError: `limit` generation batches did not fill the batch.
        """
        if self._filters.enable:
            gathered = self._filled(roles, prompts, n)
        else:
            gathered = Gathered(prompts, *self._answer(roles, prompts, n), {})
        if greedy_baselines:
            gathered = gathered._replace(baselines=(self._baselines(roles, gathered.prompts, n),))
        return gathered

    def _filled(self, roles: Roles, prompts: BatchFuture, n: int) -> Gathered:
        """A batch full of prompts whose responses differ."""
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
            remedy="where the model answers all prompts alike little is left to learn: give other data, more "
            f"responses per prompt, or a smaller data.train_batch_size; {FILTER}.max_num_gen_batches allows "
            "more tries",
        )

    def _answer(self, roles: Roles, prompts: BatchFuture, n: int) -> tuple[BatchFuture, BatchFuture]:
        """Draws n samples of each prompt and their scores, and tells the sampler of prompts of them."""
        samples, scores = roles.generate(prompts, n, self.params, self.dealer, learns=True)
        scores = self.shaped(roles, samples, scores)
        self.prompts.observe(samples, scores)
        return samples, scores

    def shaped(self, roles: Roles, samples: BatchFuture, scores: BatchFuture) -> BatchFuture:
        """The scores that are learnt from: others in place of failed ones, less the punishment for length."""
        if self._leaves_out_failed:
            given = samples.select("response_mask", "uid").union(scores)
            found: BatchFuture = roles.batch.stand_in(given)
            kept = set(scores.index.columns) - {"scores", "token_level_scores"}
            scores = scores.select(*kept).union(found)
        return self._punished(roles, samples, scores)

    def _punished(self, roles: Roles, samples: BatchFuture, scores: BatchFuture) -> BatchFuture:
        """The scores less the punishment for length."""
        overlong = self._overlong
        if not overlong.enable:
            return scores
        assert overlong.len is not None, "the config refuses this without a length"
        punished: BatchFuture = roles.batch.punish_overlong(
            samples.select("response_mask").union(scores),
            self.params.max_tokens,
            overlong.len,
            overlong.penalty_factor,
            overlong.log,
        )
        return punished

    def _baselines(self, roles: Roles, prompts: BatchFuture, n: int) -> BatchFuture:
        """`reward_baselines`: the total reward of the greedy response to each prompt, which has the limits,
        the penalties and the punishment for length of the samples; n times, beside the prompt's n samples.
        Timed as `gen_max`."""
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
        batches: how many batches it has.
        n: samples per prompt.
        params: how to sample.
        writes_samples: whether the samples go into the run folder.
        shown: how many of them the loggers get as text.
        dealer: says which problems are better answered by the same rank.
    """

    batches: int
    n: int
    params: SamplingParams
    writes_samples: bool
    shown: int = 0
    dealer: Dealer = field(default_factory=Dealer)

    def run(self, step: int, roles: Roles) -> dict[str, float]:
        """`val/accuracy` and `val/reward`, over all problems and per data source."""
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
