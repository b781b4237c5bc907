"""Tokens that were drawn and not yet accepted; the next step reads them on the device meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.device import upload
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
        """Asks for the tokens now, so that they do not wait for what is launched after them."""
        device = drawn.tokens_R.device
        if device.type != "cuda":
            return cls(rows, drawn.tokens_R, version, drawn, None)
        fetched = Drawn(*(part.to("cpu", non_blocking=True) for part in drawn))
        arrival = torch.cuda.current_stream(device).record_event()
        return cls(rows, drawn.tokens_R, version, fetched, arrival)

    def arrived(self) -> Drawn:
        """All that was drawn, on the host, once it is there."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._fetched

    def insert(self, ids_T: Tensor, place: Index) -> None:
        """Puts the tokens where they are a step's input; place[t] is -1 where ids_T[t] is known."""
        if len(place) == len(self.tokens_R) and (place == np.arange(len(place))).all():
            ids_T[: len(place)] = self.tokens_R
            return
        at = np.flatnonzero(place >= 0)
        at_N, place_N = (upload(part, ids_T.device) for part in (at, place[at]))
        ids_T[at_N] = self.tokens_R[place_N]
