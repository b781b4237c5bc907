"""Keys and values of the running sequences, one row each, and attention over them.

Keys are stored transposed, (rows, kv_heads, key_dim, columns): a decode step is then two batched
matmuls with the query heads of one key head as their rows, 1.5 to 3 times faster in bf16 on a CPU
than scaled_dot_product_attention. Column t of a row holds the sequence's token t; an additive mask
hides what is not yet written. The columns are just as many as the longest running sequence needs, in
steps, because the bf16 matmul copies a matrix that is not contiguous; row and column counts are
rounded, because matmul libraries prepare a kernel per shape and are slow at odd ones.

Shape suffixes: R rows of a decode step, S rows stored to, B prompts, T prompt columns, H key heads,
G query heads per key head, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

COLUMN_STEP = 32
_MAX_SPANS = 4
_NARROWER = 0.6  # a narrower span's extra calls and copies cost less than the columns it saves


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt batch after its forward.

    Attributes:
        keys, values: per layer (B, H, T, D); columns beyond a prompt's length hold finite noise.
        logits_BV: those that predict the token after each prompt.
    """

    keys: list[Tensor]
    values: list[Tensor]
    logits_BV: Tensor

    def prompt(self, index: int) -> Prefill:
        """A copy of one prompt's part."""
        pick = slice(index, index + 1)
        return Prefill(
            [k[pick].clone() for k in self.keys],
            [v[pick].clone() for v in self.values],
            self.logits_BV[pick].clone(),
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring rows that attend to the same number of columns."""

    start: int
    stop: int
    columns: int


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One decode step: which column each row writes, and the spans its attention runs in.

    Attributes:
        rows_R, positions_R: int64 on the device.
        spans: cover all rows.
    """

    rows_R: Tensor
    positions_R: Tensor
    spans: tuple[Span, ...]


class KVCache:
    """See the module's docstring. Columns are added as sequences grow.

    Args:
        layers: one shape per attention layer.
        rows: sequences it holds.
    """

    def __init__(
        self, layers: Sequence[LayerShape], rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self.rows = rows
        self.columns = 0
        self.keys = [
            torch.zeros(rows, shape.kv_heads, shape.key_dim, 0, dtype=dtype, device=device)
            for shape in layers
        ]
        self.values = [
            torch.zeros(rows, shape.kv_heads, 0, shape.value_dim, dtype=dtype, device=device)
            for shape in layers
        ]
        self.mask = torch.zeros(rows, 0, dtype=dtype, device=device)
        self.reserve(1)

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * bytes_per_token(self.layers, self.mask.dtype)

    def reserve(self, columns: int) -> None:
        """Makes room for sequences of that many tokens."""
        added = round_up(columns, COLUMN_STEP) - self.columns
        if added <= 0:
            return
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            self.keys[layer] = F.pad(key, (0, added))
            self.values[layer] = F.pad(value, (0, 0, 0, added))
        self.mask = F.pad(self.mask, (0, added), value=-torch.inf)
        self.mask[:, 0] = 0  # a row that holds nothing still has a column to attend to
        self.columns += added

    def resized(self, rows: int) -> KVCache:
        """A cache of another number of rows with this one's content, as far as it fits."""
        out = KVCache(self.layers, rows, self.mask.dtype, self.mask.device)
        out.reserve(self.columns)
        common = slice(0, min(rows, self.rows))
        for old, new in zip(
            (*self.keys, *self.values, self.mask), (*out.keys, *out.values, out.mask), strict=True
        ):
            new[common] = old[common]
        return out

    def store(self, prefill: Prefill, source_S: Tensor, rows_S: Tensor, lengths_S: Tensor) -> None:
        """Copies prompt source_S[i], lengths_S[i] tokens long, to row rows_S[i]."""
        width = prefill.keys[0].shape[2]
        self.reserve(width)
        for layer, (key, value) in enumerate(zip(prefill.keys, prefill.values, strict=True)):
            self.keys[layer][rows_S, :, :, :width] = key[source_S].transpose(-1, -2)
            self.values[layer][rows_S, :, :width] = value[source_S]
        hidden = torch.arange(self.columns, device=self.mask.device) >= lengths_S[:, None]
        self.mask[rows_S] = torch.zeros_like(self.mask[rows_S]).masked_fill_(hidden, -torch.inf)

    def move(self, source_S: Tensor, target_S: Tensor, columns: int) -> None:
        """Copies the first `columns` columns of rows to other rows, all read before any is written."""
        width = min(round_up(columns, COLUMN_STEP), self.columns)
        for key, value in zip(self.keys, self.values, strict=True):
            key[target_S, :, :, :width] = key[source_S, :, :, :width]
            value[target_S, :, :width] = value[source_S, :, :width]
        self.mask[target_S] = self.mask[source_S]

    def plan(self, context_R: np.ndarray) -> DecodePlan:
        """The decode step of rows 0..R-1 whose caches hold `context_R` tokens; opens their next column."""
        self.reserve(int(context_R.max()) + 1)
        rows_R = torch.arange(len(context_R), device=self.mask.device)
        positions_R = torch.from_numpy(context_R).to(self.mask.device)
        self.mask[rows_R, positions_R] = 0
        return DecodePlan(rows_R, positions_R, spans(context_R + 1))

    def write(self, layer: int, plan: DecodePlan, keys_RHD: Tensor, values_RHD: Tensor) -> None:
        """Puts one token's keys and values into each row's next column."""
        self.keys[layer][plan.rows_R, :, :, plan.positions_R] = keys_RHD
        self.values[layer][plan.rows_R, :, plan.positions_R] = values_RHD

    def attend(self, layer: int, plan: DecodePlan, query_RHGD: Tensor, window: int | None = None) -> Tensor:
        """Attention of one query token per row over its columns, (R, H, G, value_dim).

        Args:
            query_RHGD: already scaled.
            window: columns further back than this are not seen (sliding-window layers).
        """
        out = [self._attend_span(layer, span, query_RHGD, plan.positions_R, window) for span in plan.spans]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _attend_span(
        self, layer: int, span: Span, query_RHGD: Tensor, positions_R: Tensor, window: int | None
    ) -> Tensor:
        rows, columns = slice(span.start, span.stop), span.columns
        mask = self.mask[rows, None, None, :columns]
        if window is not None and window < columns:
            too_old = (
                torch.arange(columns, device=mask.device) <= positions_R[rows, None, None, None] - window
            )
            mask = mask.masked_fill(too_old, -torch.inf)
        scores = torch.matmul(query_RHGD[rows], self.keys[layer][rows, :, :, :columns])
        return torch.matmul(scores.add_(mask).softmax(-1), self.values[layer][rows, :, :columns])


def spans(needed_R: np.ndarray) -> tuple[Span, ...]:
    """Cuts rows 0..R-1, where row i needs `needed_R[i]` columns, into at most four spans.

    A span is as wide as its widest row, so rows in falling order of need waste least; a new span
    begins where enough columns can be left out.
    """
    widths = -(-needed_R // COLUMN_STEP) * COLUMN_STEP
    envelope = np.maximum.accumulate(widths[::-1])[::-1]  # what this row or a later one needs
    starts, columns = [0], [int(envelope[0])]
    while len(starts) < _MAX_SPANS and envelope[-1] <= _NARROWER * columns[-1]:
        start = int(np.argmax(envelope <= _NARROWER * columns[-1]))
        starts.append(start)
        columns.append(int(envelope[start]))
    stops = [*starts[1:], len(widths)]
    return tuple(Span(a, b, c) for a, b, c in zip(starts, stops, columns, strict=True))


def area(parts: Sequence[Span]) -> int:
    """Columns read over all rows."""
    return sum((span.stop - span.start) * span.columns for span in parts)


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers) * dtype.itemsize


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def decode_rows(rows: int) -> int:
    """Rows a decode step is run with for that many sequences."""
    if rows <= 8:
        return 1 << max(rows - 1, 0).bit_length()
    return round_up(rows, 8 if rows <= 64 else 16)
