"""Attention over the paged cache: the protocol, and the choice of kernel."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Literal, Protocol

from torch import Tensor, float64

from tandem.engines.rollout.native.attention.cpu import why_not_cpu
from tandem.engines.rollout.native.paged import PagedCache, StepInput

AttentionName = Literal["auto", "torch", "cpu", "triton"]


class Attention(Protocol):
    """Reads and writes one `PagedCache`."""

    cache: PagedCache

    def write(self, layer: int, step: StepInput, keys_THD: Tensor, values_THD: Tensor) -> None:
        """Put the step's keys and values into their slots; those of tokens with slot -1 go nowhere."""

    def attend(
        self, layer: int, step: StepInput, query_TND: Tensor, *, window: int = 0, softcap: float = 0.0
    ) -> Tensor:
        """The result (T, N, value_dim), contiguous, in the cache's dtype. Token t of a sequence sees that
        sequence's columns 0..position.

        Args:
            query_TND: already scaled, in the cache's dtype or float32; the query heads of one key head stand
                side by side. Rows beyond the step's tokens are left out: the result's are not set.
            window: only the last `window` of these columns are seen; 0 for all.
            softcap: scores x pass through softcap * tanh(x / softcap); 0 for none.
        """


# By the name of the module, which is loaded when it is asked for: Triton is not installed everywhere.
_ATTENTIONS = {"torch": "TorchAttention", "cpu": "CPUAttention", "triton": "TritonAttention"}


def make_attention(cache: PagedCache, name: AttentionName = "auto") -> Attention:
    """Make the attention of that name over a cache; "auto" is the fastest that can run there."""
    if name == "auto":
        name = "torch" if why_not_cpu(cache) else "cpu"
        if cache.device.type == "cuda" and cache.dtype != float64 and find_spec("triton"):
            name = "triton"
    made: Attention = getattr(import_module(f"{__name__}.{name}"), _ATTENTIONS[name])(cache)
    return made
