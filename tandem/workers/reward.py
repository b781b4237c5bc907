"""Scores responses with reward functions: decodes, calls, and places each score at the response's
last token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.rewards import Item, Scorer, score
from tandem.runtime import Dispatch, register
from tandem.workers.base import TimedWorker, response_texts


class RewardWorker(TimedWorker):
    """The worker that scores responses with reward functions.

    Args:
        tokenizer: decodes responses.
        reward: the user's own; None takes each data source's.
        run: the run folder.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reward: Scorer | None, run: RunFolder) -> None:
        super().__init__(run, "reward")
        self.tokenizer = tokenizer
        self.reward = reward

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_rewards(self, batch: DataProto) -> DataProto:
        """Scores the responses of some samples.

        Returns:
            `scores` (B) fp32, `token_level_scores` ragged fp32 with the score at the last response
            token, `reward_extra` (B) dicts of numbers, and the decoded `response_text`.
        """
        with self.timeline.phase("reward"):
            return self._scored(batch)

    compute_scores = compute_rewards

    def _scored(self, batch: DataProto) -> DataProto:
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
        scored = score(items, self.reward)
        scores_B = torch.tensor([s.score for s in scored], dtype=torch.float32)
        return DataProto(
            {
                "scores": scores_B,
                "token_level_scores": at_last_token(scores_B, batch.ragged("response_mask")),
            },
            {"reward_extra": [s.extra for s in scored], "response_text": texts},
        )


def at_last_token(scores_B: torch.Tensor, mask: Ragged) -> Ragged:
    """Each sample's score at its last true entry of `mask`, zero elsewhere. A sample without
    response tokens has no place for its score and keeps zeros."""
    values_T = torch.zeros(len(mask.values), dtype=scores_B.dtype)
    place_T = torch.where(mask.values, mask.positions() + 1, 0)
    last_B = torch.zeros(len(mask), dtype=torch.int64).scatter_reduce(0, mask.row_ids(), place_T, "amax")
    has_response = last_B > 0
    values_T[(mask.offsets[:-1] + last_B - 1)[has_response]] = scores_B[has_response]
    return mask.with_values(values_T)
