"""The worker that scores responses with reward functions.

The worker decodes the responses, calls the reward functions, and stores each score at the response's last
token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.rewards import RewardConfig
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.rewards import Item, Pool, Scored, Scorer
from tandem.runtime import Dispatch, register
from tandem.watch.gap import FINGERPRINT, SCORED, fingerprint
from tandem.workers.base import TimedWorker, response_texts

FAILED = "reward_failed"
"""The name of the column that is true for samples that could not be scored."""


class RewardWorker(TimedWorker):
    """The worker that scores responses with reward functions.

    Args:
        tokenizer: The tokenizer that decodes the responses.
        reward: The user's reward function. None means the built-in function for each sample's data source.
        config: The config section with the settings for calling the functions.
        run: The run folder. The output of the functions goes to its log/rewards-RANK.log.
    """

    in_thread = True

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, reward: Scorer | None, config: RewardConfig, run: RunFolder
    ) -> None:
        super().__init__(run, "reward")
        self.tokenizer = tokenizer
        self.pool = Pool(reward, config, run.logs / f"rewards-{self.rank}.log", self.say)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_rewards(self, batch: DataProto) -> DataProto:
        """Score the responses of a batch of samples.

        Args:
            batch: The samples.

        Returns:
            `scores` (B) fp32; `token_level_scores` ragged fp32, with the score at the last response token;
            `reward_extra` (B) dicts of numbers; `reward_why` (B) texts that explain the scores; and the
            decoded `response_text`. If samples that could not be scored are left out, also `reward_failed`
            (B) bool.
        """
        with self.timeline.phase("reward"):
            texts = response_texts(self.tokenizer, batch)
            arrays = batch.non_tensor_batch
            named = ("data_source", "ground_truth", "extra_info", "index", "uid")
            columns: Iterable[Any] = arrays.get("columns", [{}] * len(texts))
            written = zip(batch.ragged("tokens"), batch.ragged("response_mask"), strict=True)
            items = [
                Item(source, text, truth, extra, index, row, uid, ids[mask].tolist() if row else ())
                for source, truth, extra, index, uid, text, row, (ids, mask) in zip(
                    *(arrays[name] for name in named), texts, columns, written, strict=True
                )
            ]
            scored = self.pool.score(items)
            self._observe(scored)
            scores_B = torch.tensor([s.score for s in scored], dtype=torch.float32)
            placed, failed_B = at_last_token(scores_B, batch.ragged("response_mask")), None
            if self.pool.config.on_error == "drop":
                failed_B = torch.tensor([s.failed for s in scored], dtype=torch.bool)
            extras, whys = [s.extra for s in scored], [s.why for s in scored]
            found = scored_batch(scores_B, placed, failed_B, extras, whys, texts)
            if FINGERPRINT in batch:
                found.batch[SCORED] = fingerprint(batch.ragged("tokens"))
            return found

    compute_scores = compute_rewards

    def _observe(self, scored: Sequence[Scored]) -> None:
        """Add the metrics of the batch's failures, and show the user the first failure of a run."""
        counts, self.pool.counts = self.pool.counts, Counter()
        for name in ("retried", "timeouts", "died", "recycled"):
            if counts[name]:
                self.observed.add_sum(f"reward/{name}", counts[name])
        failures = self.pool.failures
        if self.pool.config.on_error != "raise":
            self.observed.add_mean("reward/failed", len(failures), len(scored))
        if failures:
            became = {"zero": "it counts as 0", "drop": "its sample is left out of training"}
            self.say_once(
                "failed",
                f"a score failed, so {became[self.pool.config.on_error]} (reward.on_error). The metric "
                f"reward/failed is the share of such scores. The error:\n{next(iter(failures.values()))}",
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_call_seconds(self) -> list[float]:
        """Return the scoring time, in seconds, of each sample that was scored since the last call."""
        found = list(self.pool.seconds)
        self.pool.seconds.clear()
        return found

    def close(self) -> None:
        self.pool.close()


def scored_batch(
    scores_B: torch.Tensor,
    placed: Ragged,
    failed_B: torch.Tensor | None,
    extras: Sequence[Mapping[str, float]],
    whys: Sequence[str],
    texts: Sequence[str],
) -> DataProto:
    """Build the table that reward workers return; see `RewardWorker.compute_rewards`.

    Args:
        scores_B: The score of each sample.
        placed: The scores per token: each score is stored at the token that it belongs to.
        failed_B: The samples that could not be scored, if this column is needed.
        extras: Further numbers of each sample.
        whys: The explanation of each score.
        texts: The decoded responses.
    """
    found: dict[str, torch.Tensor | Ragged] = {"scores": scores_B, "token_level_scores": placed}
    if failed_B is not None:
        found[FAILED] = failed_B
    return DataProto(found, {"reward_extra": extras, "reward_why": whys, "response_text": texts})


def failed(batch: DataProto) -> torch.Tensor:
    """Return (B) bool: true for samples that could not be scored. All false if there is no such column."""
    return batch.dense(FAILED) if FAILED in batch else torch.zeros(len(batch), dtype=torch.bool)


def at_last_token(scores_B: torch.Tensor, mask: Ragged) -> Ragged:
    """Return scores per token: each sample's score at its last true entry of `mask`, zero elsewhere.

    A sample without response tokens has only zeros.
    """
    values_T = torch.zeros(len(mask.values), dtype=scores_B.dtype)
    place_T = torch.where(mask.values, mask.positions() + 1, 0)
    last_B = torch.zeros(len(mask), dtype=torch.int64).scatter_reduce(0, mask.row_ids(), place_T, "amax")
    has_response = last_B > 0
    values_T[(mask.offsets[:-1] + last_B - 1)[has_response]] = scores_B[has_response]
    return mask.with_values(values_T)
