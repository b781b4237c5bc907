"""Sampled tokens in flight: tokens that the host has not received yet, but the next step already reads."""

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
    """The sampled tokens of one step that are in flight.

    Attributes:
        rows: The row of each token. -1 if the token's sequence has ended in the meantime.
        tokens_R: The tokens, on the device.
        version: The version of the weights that computed the logits.
        arrival: The CUDA event after the step and the copy of its tokens. None on other devices.
    """

    rows: Index
    tokens_R: Tensor
    version: int
    arrival: torch.cuda.Event | None
    _fetched: Drawn

    @classmethod
    def of(cls, rows: Index, drawn: Drawn, version: int) -> Flight:
        """Start to copy sampled tokens and their log-probs to the host.

        All tensors are joined into a single copy. The copy starts immediately, so that it does not wait for
        work that is launched later.
        """
        device = drawn.tokens_R.device
        if device.type != "cuda":
            return cls(rows, drawn.tokens_R, version, None, drawn)
        distinct = list({id(part): part for part in drawn}.values())
        joined = _join_bytes(distinct).to("cpu", non_blocking=True)
        arrival = torch.cuda.current_stream(device).record_event()
        fetched = dict(zip(map(id, distinct), _split_bytes(joined, distinct), strict=True))
        return cls(rows, drawn.tokens_R, version, arrival, Drawn(*(fetched[id(part)] for part in drawn)))

    def arrived(self) -> Drawn:
        """Wait until the tokens and log-probs are on the host, and return them."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self._fetched

    def wanted(self, place: Index) -> tuple[Index, ...]:
        """Return the indices that `insert` needs. The caller sends them to the device.

        Args:
            place: For each token of a step, the index of the token in flight from which it is read. -1 if the
                host already knows the token.
        """
        if len(place) == len(self.tokens_R) and (place == np.arange(len(place))).all():
            return ()
        at = np.flatnonzero(place >= 0)
        return at, place[at]

    def insert(self, ids_T: Tensor, wanted: Sequence[Tensor]) -> None:
        """Insert the tokens in flight into a step's input.

        Args:
            ids_T: The input tokens of the step, changed in place.
            wanted: The indices that `wanted` returned, on the device.
        """
        if not wanted:
            ids_T[: len(self.tokens_R)] = self.tokens_R
            return
        at_N, place_N = wanted
        ids_T[at_N] = self.tokens_R[place_N]


def in_flight(flight: Flight | None, capacity: int) -> Index:
    """Return for each row the index of its token in flight, or -1 if it has none."""
    place = np.full(capacity, -1)
    if flight is not None:
        alive = np.flatnonzero(flight.rows >= 0)
        place[flight.rows[alive]] = alive
    return place


def _join_bytes(parts: Sequence[Tensor]) -> Tensor:
    """Return one uint8 tensor with the bytes of tensors that have the same number of elements.

    The tensor with the widest dtype must come first, so that all parts are aligned.
    """
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def _split_bytes(joined: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the result of `_join_bytes`, one per part, with the part's dtype."""
    pieces = torch.split(joined, [part.nbytes for part in parts])
    return [piece.view(part.dtype) for piece, part in zip(pieces, parts, strict=True)]
