"""Deal prompts to the ranks of a rollout so that each rank is expected to write about as many tokens.

Ranks sample at the same time, so generation takes as long as the rank that writes the most. A prompt that was
answered before is expected to take as many tokens as it took then. A new prompt is expected to take the mean
of all responses so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.balance import dealt, even
from tandem.runtime.index import Index


class Dealer:
    """Remembers how long the responses to each prompt were.

    The order changes which rank answers a prompt, never the response. So it is not part of a checkpoint.
    """

    def __init__(self) -> None:
        self._written: dict[str, float] = {}  # prompt → mean tokens of its last responses
        self._tokens, self._responses = 0, 0

    def order(self, prompts: Index, shares: int) -> Tensor | None:
        """Return the order in which to deal the prompts: row numbers, int64; None if any order will do.

        Args:
            prompts: The prompts, with the ragged column `prompts`.
            shares: The number of consecutive shares that the prompts are cut into. Their sizes differ by at
                most one.
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
        """Record how long the responses were.

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
    """Return the part of a uid that is the same in every epoch; a uid is "EPOCH-NUMBER"."""
    return uid.rpartition("-")[2]
