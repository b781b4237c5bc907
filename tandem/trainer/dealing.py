"""Assign prompts to rollout ranks so that all ranks are expected to generate about equally many tokens.

Ranks sample at the same time, so the rank that generates the most tokens determines the generation time. If a
prompt was answered before, its expected length is the length of the earlier responses. The expected length of
a new prompt is the mean over all responses so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.balance import dealt, even
from tandem.runtime.index import Index


class Dealer:
    """Records the response lengths of each prompt, and orders prompts by expected length.

    The order only decides which rank answers a prompt. It never changes the response. So these lengths are
    not stored in a checkpoint.
    """

    def __init__(self) -> None:
        self._written: dict[str, float] = {}  # prompt → mean tokens of its last responses
        self._tokens, self._responses = 0, 0

    def order(self, prompts: Index, shares: int) -> Tensor | None:
        """Return the order in which to assign prompts: row numbers, int64; None if the order does not matter.

        Args:
            prompts: The prompts, with the ragged column `prompts`.
            shares: The number of ranks. The prompts are split into this many consecutive slices, whose sizes
                differ by at most one.
        """
        if shares == 1 or prompts.uids is None:
            return None
        mean = self._tokens / max(1, self._responses)
        read = prompts.lengths["prompts"].tolist()
        weights = [
            length + self._written.get(_prompt(uid), mean)
            for uid, length in zip(prompts.uids, read, strict=True)
        ]
        sizes = [share.stop - share.start for share in even(len(prompts), shares)]
        return torch.tensor([row for rows in dealt(weights, sizes) for row in rows])

    def learn(self, prompts: Index, samples: Index) -> None:
        """Record the lengths of responses.

        Args:
            prompts: The prompts, with the ragged column `prompts`.
            samples: The responses to those prompts, with the ragged column `tokens` (prompt and response).
        """
        if prompts.uids is None or samples.uids is None:
            return
        read = dict(zip(prompts.uids, prompts.lengths["prompts"].tolist(), strict=True))
        written: dict[str, list[int]] = {}
        for uid, length in zip(samples.uids, samples.lengths["tokens"].tolist(), strict=True):
            written.setdefault(_prompt(uid), []).append(length - read[uid])
        for prompt, lengths in written.items():
            self._written[prompt] = sum(lengths) / len(lengths)
            self._tokens += sum(lengths)
            self._responses += len(lengths)


def _prompt(uid: str) -> str:
    """Return the prompt's number from a uid "EPOCH-NUMBER". The number is the same in every epoch."""
    return uid.rpartition("-")[2]
