"""Edits of raw logits before the temperature is applied, for the rows that need edits.

There are three kinds of edits: stop tokens that are barred until `min_tokens` is reached, biases, and
penalties on tokens that have occurred.

Shape suffixes: R rows, V vocabulary, E edited rows, P penalized rows, S slots, L tokens of the longest prompt
and response, N entries of (row, token).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.device import upload

_FIRST_SLOTS = 8


class History:
    """The prompt and response tokens of the penalized sequences, on the logits' device.

    Each penalized sequence has one slot.

    Attributes:
        counts_SV: int32, how often each token occurs in the response.
        ids_SL: int64, prompt and response. Entries beyond the end of a sequence have no meaning.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.counts_SV = torch.zeros(_FIRST_SLOTS, vocabulary, dtype=torch.int32, device=device)
        self.ids_SL = torch.zeros(_FIRST_SLOTS, 1, dtype=torch.int64, device=device)
        self._free = list(range(_FIRST_SLOTS))

    def open(self) -> int:
        """Reserve a free slot and return its number. The slot's content is arbitrary."""
        if not self._free:
            slots = len(self.counts_SV)
            self.counts_SV = torch.cat((self.counts_SV, torch.zeros_like(self.counts_SV)))
            self.ids_SL = torch.cat((self.ids_SL, torch.zeros_like(self.ids_SL)))
            self._free = list(range(slots, 2 * slots))
        return self._free.pop()

    def close(self, slots: np.ndarray) -> None:
        self._free += [int(slot) for slot in slots]

    def set(self, slot: int, prompt_ids: np.ndarray, token_ids: np.ndarray) -> None:
        """Fill the slot with a prompt and the response tokens generated so far."""
        ids_T = upload(np.concatenate((prompt_ids, token_ids)).astype(np.int64), self.ids_SL.device)
        self.widen(len(ids_T))
        self.ids_SL[slot, : len(ids_T)] = ids_T
        written_T = ids_T[len(prompt_ids) :]
        self.counts_SV[slot] = 0
        self.counts_SV[slot].index_add_(0, written_T, torch.ones_like(written_T, dtype=torch.int32))

    def widen(self, length: int) -> None:
        """Grow the table so that sequences of this length fit."""
        if length > self.ids_SL.shape[1]:
            self.ids_SL = F.pad(self.ids_SL, (0, 2 * length - self.ids_SL.shape[1]))


class Penalties(NamedTuple):
    """The penalties of P rows (see `SamplingParams`).

    Penalties change only the logits of tokens in the row's history.

    Attributes:
        history: The tokens of the penalized sequences.
        rows_P: int64, the row numbers.
        slots_P: int64, the rows' slots in `history`.
        repetition_P: float64, the repetition penalties.
        frequency_P: float64, the frequency penalties.
        presence_P: float64, the presence penalties.
        lengths_P: int64, the number of prompt and response tokens at this step.
        longest: The largest number in `lengths_P`.
    """

    history: History
    rows_P: Tensor
    slots_P: Tensor
    repetition_P: Tensor
    frequency_P: Tensor
    presence_P: Tensor
    lengths_P: Tensor
    longest: int

    def apply(self, logits_RV: Tensor) -> None:
        """Apply the penalties to the logits in place.

        A token that occurs twice in the history is looked up twice and gets the same value twice.
        """
        ids_PL = self.history.ids_SL[self.slots_P, : self.longest]
        there_PL = torch.arange(self.longest, device=ids_PL.device) < self.lengths_P[:, None]
        ids_PL = torch.where(there_PL, ids_PL, ids_PL[:, :1])
        rows_P1, dtype = self.rows_P[:, None], logits_RV.dtype
        repetition, frequency, presence = (
            column_P.to(dtype)[:, None] for column_P in (self.repetition_P, self.frequency_P, self.presence_P)
        )
        before_PL = logits_RV[rows_P1, ids_PL]
        counts_PL = self.history.counts_SV[self.slots_P[:, None], ids_PL].to(dtype)
        after_PL = torch.where(before_PL > 0, before_PL / repetition, before_PL * repetition)
        logits_RV[rows_P1, ids_PL] = after_PL - frequency * counts_PL - presence * (counts_PL > 0)

    def note(self, tokens_R: Tensor) -> None:
        """Add the sampled tokens of all rows to the history."""
        tokens_P = tokens_R[self.rows_P]
        self.history.counts_SV[self.slots_P, tokens_P] += 1
        self.history.ids_SL[self.slots_P, self.lengths_P] = tokens_P


Biases = tuple[Tensor, Tensor, Tensor]
"""Rows, tokens, and the values added to their logits (N entries each). Each (row, token) is unique."""


@dataclass(frozen=True, slots=True)
class Edits:
    """All changes to the logits of one step.

    Attributes:
        rows_E: int64, the rows whose logits are changed, in ascending order.
        barred: Pairs of row and token (N entries) that must not be sampled.
    """

    rows_E: Tensor
    barred: tuple[Tensor, Tensor] | None = None
    biases: Biases | None = None
    penalties: Penalties | None = None

    def applied(self, logits_RV: Tensor) -> Tensor:
        """Return a copy of the logits with all edits applied."""
        logits_RV = logits_RV.clone()
        if self.barred is not None:
            logits_RV[self.barred] = -torch.inf
        if self.biases is not None:
            rows_N, tokens_N, values_N = self.biases
            logits_RV[rows_N, tokens_N] += values_N.to(logits_RV.dtype)
        if self.penalties is not None:
            self.penalties.apply(logits_RV)
        return logits_RV
