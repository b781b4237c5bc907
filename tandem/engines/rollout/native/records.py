"""The experts that computed the tokens of finished sequences, read from the KV cache.

The cache stores the choice of the routers beside each token's keys and values. So the choice follows the
blocks of the cache: when a prompt's blocks are shared, found again, copied, or computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.device import upload
from tandem.engines.rollout.native.paged import PagedCache
from tandem.engines.rollout.native.plan import Index
from tandem.models.routing import Mixtures
from tandem.protocol import Sample


@dataclass(eq=False)
class Records:
    """A reader of the recorded experts.

    On CUDA, it reads on its own stream, beside a step that is already launched. That step overwrites no slot
    of a sequence that has finished. Later steps wait for the reader.
    """

    device: torch.device
    _stream: torch.cuda.Stream | None = None

    def add(
        self,
        samples: Sequence[Sample],
        slots: Sequence[Index],
        cache: PagedCache,
        mixtures: Mixtures,
        written: torch.cuda.Event | None,
    ) -> None:
        """Set `routed_experts` of samples.

        Args:
            samples: Finished samples.
            slots: For each sample, the cache slots of all its tokens except the last.
            cache: The cache.
            mixtures: The mixtures of the model.
            written: The CUDA event after which the slots have their content. None on other devices.
        """
        found = torch.from_numpy(self._read(np.concatenate(slots), cache, written))
        experts_TLK = found.view(mixtures.dtype).view(len(found), mixtures.layers, mixtures.each).numpy()
        ends = np.cumsum([len(part) for part in slots])[:-1]
        for sample, part in zip(samples, np.split(experts_TLK, ends), strict=True):
            sample.routed_experts = np.pad(part, ((0, 1), (0, 0), (0, 0)))

    def _read(self, slots: Index, cache: PagedCache, written: torch.cuda.Event | None) -> np.ndarray:
        if written is None:
            return cache.recorded(torch.from_numpy(slots)).numpy()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(written)
        with torch.cuda.stream(self._stream):
            found = cache.recorded(upload(slots, self.device)).to("cpu", non_blocking=True)
            read = self._stream.record_event()
        torch.cuda.current_stream(self.device).wait_event(read)
        read.synchronize()
        return found.numpy()
