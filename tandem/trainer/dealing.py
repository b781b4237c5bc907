"""Prompts dealt to the ranks of a rollout so that each is expected to write about as much.

Ranks sample at the same time, so generation takes as long as the rank with the most to write. A prompt that
was answered before is expected to take as many tokens as then; one that was not, as many as all took that
were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.balance import dealt, even
from tandem.runtime.index import Index


class Dealer:
    """Remembers how long the responses to each prompt were.

    What it says changes where a prompt is answered, never how: it is no part of a checkpoint.
    """

    def __init__(self) -> None:
        self._written: dict[str, float] = {}  # prompt → mean tokens of its last responses
        self._tokens, self._responses = 0, 0

    def order(self, prompts: Index, shares: int) -> Tensor | None:
        """The rows of prompts in the order to deal them in, int64; None where every order is as good.

        Args:
            prompts: with the ragged column `prompts`.
            shares: in how many successive shares they are dealt; their sizes differ by one at most.
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
        """Takes note of how long the responses were.

        Args:
            samples: of those prompts, with the ragged column `tokens`: prompt and response.
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
    """A prompt's name in every epoch: its uid is "EPOCH-NUMBER"."""
    return uid.rpartition("-")[2]
