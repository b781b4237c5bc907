"""The protocol of attention over the paged KV cache, and a factory that chooses the implementation."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Literal, Protocol

from torch import Tensor, float64

from tandem.engines.rollout.native.attention.cpu import why_not_cpu
from tandem.engines.rollout.native.paged import FULL, PagedCache, Sight, StepInput

AttentionName = Literal["auto", "torch", "cpu", "triton"]


class Attention(Protocol):
    """The protocol of attention that reads and writes one `PagedCache`."""

    cache: PagedCache

    def write(self, layer: int, step: StepInput, keys_THD: Tensor, values_THD: Tensor) -> None:
        """Write the step's keys and values into their slots. Tokens with slot -1 are skipped."""

    def attend(self, layer: int, step: StepInput, query_TND: Tensor, sight: Sight = FULL) -> Tensor:
        """Return the attention output, (T, N, value_dim), contiguous, in the cache's dtype.

        Blocks that hold no column which a token of the step sees are not used.

        Args:
            layer: The layer's index.
            step: The input of the step.
            query_TND: Scaled queries, in the cache's dtype or float32. The query heads of one key head are
                adjacent. Rows beyond the step's tokens are skipped, and their results are undefined.
            sight: What each query sees.
        """


# Module names and class names. A module is imported when it is needed, because Triton is not installed
# everywhere.
_ATTENTIONS = {"torch": "TorchAttention", "cpu": "CPUAttention", "triton": "TritonAttention"}


def make_attention(cache: PagedCache, name: AttentionName = "auto") -> Attention:
    """Create the named attention for a cache. "auto" selects the fastest implementation that supports it."""
    if name == "auto":
        name = "torch" if why_not_cpu(cache) else "cpu"
        if cache.device.type == "cuda" and cache.dtype != float64 and find_spec("triton"):
            name = "triton"
    made: Attention = getattr(import_module(f"{__name__}.{name}"), _ATTENTIONS[name])(cache)
    return made
