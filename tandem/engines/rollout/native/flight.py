"""Tokens that were drawn and not yet accepted; the next step reads them on the device meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.engines.rollout.draws.sampler import Drawn
from tandem.engines.rollout.native.plan import Index


@dataclass(slots=True)
class Flight:
    """Tokens drawn in one step.

    Attributes:
        rows: whose; -1 for a sequence that has ended meanwhile.
        tokens_R: on the device.
        version: of the weights that gave the logits.
    """

    rows: Index
    tokens_R: Tensor
    version: int
    _fetched: Drawn
    _arrival: torch.cuda.Event | None

    @classmethod
    def of(cls, rows: Index, drawn: Drawn, version: int) -> Flight:
        """Ask for the tokens now, in one copy, so that they do not wait for what is launched after them."""
        device = drawn.tokens_R.device
        if device.type != "cuda":
            return cls(rows, drawn.tokens_R, version, drawn, None)
        distinct = list({id(part): part for part in drawn}.values())
        joined = _together(distinct).to("cpu", non_blocking=True)
        arrival = torch.cuda.current_stream(device).record_event()
        fetched = dict(zip(map(id, distinct), _apart(joined, distinct), strict=True))
        return cls(rows, drawn.tokens_R, version, Drawn(*(fetched[id(part)] for part in drawn)), arrival)

    def arrived(self) -> Drawn:
        """All that was drawn, on the host, once it is there."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._fetched

    def wanted(self, place: Index) -> tuple[Index, ...]:
        """What `insert` needs on the device.

        Args:
            place: of each token of a step among these; -1 where it is known.
        """
        if len(place) == len(self.tokens_R) and (place == np.arange(len(place))).all():
            return ()
        at = np.flatnonzero(place >= 0)
        return at, place[at]

    def insert(self, ids_T: Tensor, wanted: Sequence[Tensor]) -> None:
        """Put the tokens where they are a step's input; see `wanted`."""
        if not wanted:
            ids_T[: len(self.tokens_R)] = self.tokens_R
            return
        at_N, place_N = wanted
        ids_T[at_N] = self.tokens_R[place_N]


def in_flight(flight: Flight | None, capacity: int) -> Index:
    """For each of so many rows, which of the tokens in flight is its own; -1 where none is."""
    place = np.full(capacity, -1)
    if flight is not None:
        alive = np.flatnonzero(flight.rows >= 0)
        place[flight.rows[alive]] = alive
    return place


def _together(parts: Sequence[Tensor]) -> Tensor:
    """uint8: the bytes of tensors with as many numbers each, those of the widest type first."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def _apart(joined: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Views of what `_together` made, with the types of its parts."""
    pieces = torch.split(joined, [part.nbytes for part in parts])
    return [piece.view(part.dtype) for piece, part in zip(pieces, parts, strict=True)]
