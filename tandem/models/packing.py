"""The layout of a micro-batch whose sequences are packed into one row.

The layout is planned once on the host, before any layer runs.

Shapes: B sequences; N input tokens of all sequences together; P entries of the padded buffer for attention
kernels that need rectangles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.device import to_device
from tandem.models.routing import Routing
from tandem.models.sequence_parallel import SequenceSplit
from tandem.protocol import Ragged
from tandem.protocol.ragged import span_indices

# A sequence in a rectangle may be shorter than the longest one by this fraction or by this many tokens. A
# larger slack would compute more padding. A smaller slack would need too many kernel calls.
_SLACK_SHARE = 8
_SLACK_TOKENS = 8
# The length of filler sequences. It is short because attention's work grows with the square of the length.
_FILLER_TOKENS = 128


class Packing:
    """The layout of packed sequences, which attention needs.

    This is a plain class, because FSDP copies the fields of dataclasses.

    Args:
        lengths: the number of tokens of each sequence, at least one, in the order of the row.
        device: the device of the model.
        split: the ranks that share the tokens; their number must divide the number of tokens. None for one
            rank.
        whole_lengths: the number of tokens of each sequence, also of those that are not part of the input;
            None: `lengths`.

    Attributes:
        position_ids: (N) int64, the position of each token in its sequence, for this rank's shard of the
            tokens.
        cu_seqlens: (B+1) int32, the offsets of the sequences, as variable-length kernels need them.
        tokens: N.
        max_length: the length of the longest sequence.
        rectangles: (rows, width) of each rectangle (a padded block of sequences of similar length), longest
            first. The rectangles are consecutive in the padded buffer.
        padded_tokens: P, the number of entries of the buffer.
        places: (N) int64, the position of each token in the buffer; None if it equals the token's position in
            the row, so that no copy is needed.
        split: the argument `split`.
        lengths: the argument `lengths`.
        whole_lengths: the argument `whole_lengths`.
        chunks: the layouts that `chunked` has made, by the size of the chunks.
    """

    __slots__ = (
        *("chunks", "cu_seqlens", "lengths", "max_length", "padded_tokens", "places", "position_ids"),
        *("rectangles", "split", "tokens", "whole_lengths"),
    )

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        split: SequenceSplit | None = None,
        *,
        whole_lengths: Sequence[int] | None = None,
    ) -> None:
        lengths_B = torch.tensor(lengths, dtype=torch.int64)
        assert len(lengths) and int(lengths_B.min()) >= 1, "a sequence without tokens"
        ends_B = lengths_B.cumsum(0)
        offsets = torch.cat([ends_B.new_zeros(1), ends_B])
        self.tokens, self.lengths = int(ends_B[-1]), tuple(lengths)
        self.whole_lengths = self.lengths if whole_lengths is None else tuple(whole_lengths)
        self.chunks: dict[int, Packing] = {}
        positions_N = torch.arange(self.tokens) - (ends_B - lengths_B).repeat_interleave(lengths_B)
        self.split = split
        self.max_length = int(lengths_B.max())
        order, self.rectangles = _rectangles(lengths_B)
        widths = torch.tensor([width for rows, width in self.rectangles for _ in range(rows)])
        starts = widths.cumsum(0) - widths
        starts_B = torch.empty_like(starts)
        starts_B[order] = starts
        places_N = starts_B.repeat_interleave(lengths_B) + positions_N
        self.padded_tokens = int(widths.sum())
        in_place = self.padded_tokens == len(places_N) and torch.equal(places_N, torch.arange(len(places_N)))
        here_N = positions_N[_share(split, len(positions_N))]
        planned = [here_N, offsets.to(torch.int32), *([] if in_place else [places_N])]
        self.position_ids, self.cu_seqlens, *places = to_device(planned, device)
        self.places = places[0] if places else None

    def chunked(self, chunk: int) -> Packing:
        """Return the layout in which every chunk of `chunk` positions is a sequence of its own."""
        if self.max_length <= chunk:
            return self
        if chunk not in self.chunks:
            pieces = [
                min(chunk, length - start) for length in self.lengths for start in range(0, length, chunk)
            ]
            self.chunks[chunk] = Packing(pieces, self.position_ids.device, self.split)
        return self.chunks[chunk]

    def places_in_rows(self) -> Tensor:
        """Return (N) int64, the position of each token if each sequence has a row of the longest length."""
        starts_B = torch.arange(len(self.lengths)) * self.max_length
        starts_N = starts_B.repeat_interleave(torch.tensor(self.lengths))
        return starts_N.to(self.position_ids.device) + self.position_ids

    def whole_lengths_here(self) -> Tensor:
        """Return (N) int64, the whole length of each token's sequence, for this rank's tokens."""
        lengths_N = torch.tensor(self.whole_lengths).repeat_interleave(torch.tensor(self.lengths))
        lengths_N = lengths_N[_share(self.split, self.tokens)]
        return lengths_N.to(self.position_ids.device)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors on the device, also those of the chunks."""
        found = [tensor for chunks in self.chunks.values() for tensor in chunks.tensors]
        found += [self.position_ids, self.cu_seqlens]
        return found if self.places is None else [*found, self.places]


def _rectangles(lengths_B: Tensor) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Return the sequences' order, longest first, and the (rows, width) of each rectangle.

    Each rectangle contains consecutive sequences of this order.
    """
    order = torch.argsort(lengths_B, descending=True, stable=True)
    rectangles: list[tuple[int, int]] = []
    rows = width = 0
    for length in lengths_B[order].tolist():
        if rows and width - length > max(_SLACK_TOKENS, width // _SLACK_SHARE):
            rectangles.append((rows, width))
            rows = 0
        width = width if rows else length
        rows += 1
    rectangles.append((rows, width))
    return order, tuple(rectangles)


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """The packed inputs of a model for one micro-batch, on the model's device.

    For a model that predicts tokens, the last token of each sequence is left out of the input, because its
    prediction is not needed. For a model that scores sequences, the outputs are the scores at chosen tokens.

    If ranks share the tokens (sequence parallelism), each rank has different inputs, and K counts only the
    rank's tokens.

    Attributes:
        input_ids: (N) int64.
        packing: the layout of the sequences.
        sources: (K) int64, the input positions whose outputs are needed.
        targets: (K) int64, the token ids that these positions predict; for scores, the tokens at these
            positions.
        places: (K) int64, the positions of the targets in the micro-batch's flat token column.
        total: the number of entries of the flat token column.
        hidden: (1, N, D), the output of an earlier pipeline stage; None if this rank's model starts with the
            token ids.
        reference: (K, D), the last hidden states of the reference policy at the sources; None if the
            reference is not needed.
        origins: (N) int64, the position of each input token in the flat token column; -1 for padding and
            filler. None unless asked for.
        routing: what happens in the model's mixtures; None: the routers choose, and nothing is recorded.
    """

    input_ids: Tensor
    packing: Packing
    sources: Tensor
    targets: Tensor
    places: Tensor
    total: int
    hidden: Tensor | None = None
    reference: Tensor | None = None
    origins: Tensor | None = None
    routing: Routing | None = None


def pack(
    tokens: Ragged,
    wanted: Tensor | None,
    *,
    device: torch.device,
    pad_to_longest: bool = False,
    whole: bool = False,
    split: SequenceSplit | None = None,
    fill: int = 0,
    origins: bool = False,
) -> PackedInputs:
    """Pack sequences into the inputs of a model.

    Args:
        tokens: B sequences of token ids, at least one token each, on the host.
        wanted: (total) bool, true at tokens whose outputs are needed; None for all tokens. The first token of
            a sequence has no prediction, so its entry is ignored unless `whole`.
        device: the device of the model.
        pad_to_longest: whether to pad every sequence to the longest length, as in padded batches. This
            computes the padding and does not change the result.
        whole: whether the model scores sequences instead of predicting tokens. Then the last token of each
            sequence is part of the input. The outputs are the scores at the tokens in `wanted`; if that is
            None, at the last token only.
        split: the ranks that share the tokens. Unused filler sequences make the number of tokens a multiple
            of the number of ranks.
        fill: the minimum number of tokens, which is reached by adding filler sequences.
        origins: whether to return the origins of the input tokens.
    """
    lengths_B = tokens.lengths
    widths_B = input_lengths(lengths_B, pad_to_longest=pad_to_longest, whole=whole)
    columns_N = span_indices(torch.zeros_like(widths_B), widths_B)
    ends_N = (lengths_B - 1).repeat_interleave(widths_B)
    picks_N = tokens.offsets[:-1].repeat_interleave(widths_B) + columns_N.minimum(ends_N)

    sources_K, places_K = _outputs(tokens, wanted, widths_B, whole=whole)
    input_ids_N, widths = tokens.values[picks_N], widths_B.tolist()
    filled = max(fill, len(input_ids_N))
    filler = filled + (-filled % split.size if split else 0) - len(input_ids_N)
    if filler:
        input_ids_N = torch.cat([input_ids_N, input_ids_N.new_zeros(filler)])
        widths += [_FILLER_TOKENS] * (filler // _FILLER_TOKENS)
        widths += [filler % _FILLER_TOKENS] if filler % _FILLER_TOKENS else []
    share = _share(split, len(input_ids_N))
    here_K = (sources_K >= share.start) & (sources_K < share.stop)
    places_K, sources_K = places_K[here_K], sources_K[here_K] - share.start
    host = [input_ids_N[share], sources_K, tokens.values[places_K], places_K]
    if origins:
        own_B = input_lengths(lengths_B, pad_to_longest=False, whole=whole)
        origins_N = picks_N.where(columns_N < own_B.repeat_interleave(widths_B), -1)
        host.append(F.pad(origins_N, (0, filler), value=-1)[share])
    input_ids, sources, targets, places, *rest = to_device(host, device)
    whole_lengths = [*lengths_B.tolist(), *widths[len(lengths_B) :]]
    packing = Packing(widths, device, split, whole_lengths=whole_lengths)
    total, found = len(tokens.values), rest[0] if rest else None
    return PackedInputs(input_ids, packing, sources, targets, places, total, origins=found)


def _outputs(
    tokens: Ragged, wanted: Tensor | None, widths_B: Tensor, *, whole: bool
) -> tuple[Tensor, Tensor]:
    """Return (K) the positions in the input, and (K) those in the token column, of the outputs; see `pack`.

    Each sequence's input starts later than its tokens by `shift`. Token t is predicted at input t - 1 and
    scored at input t.
    """
    shift_B = (widths_B.cumsum(0) - widths_B) - tokens.offsets[:-1]
    if whole:
        places_K = tokens.offsets[1:] - 1 if wanted is None else wanted.nonzero().squeeze(1)
        return places_K + shift_B[tokens.row_ids()[places_K]], places_K
    predicted_T = tokens.positions() > 0
    if wanted is not None:
        predicted_T = predicted_T & wanted
    places_K = predicted_T.nonzero().squeeze(1)
    return places_K - 1 + shift_B[tokens.row_ids()[places_K]], places_K


def input_lengths(lengths_B: Tensor, *, pad_to_longest: bool, whole: bool) -> Tensor:
    """Return (B) the number of input tokens of each sequence; see `pack`."""
    widths_B = lengths_B if whole else (lengths_B - 1).clamp(min=1)
    return widths_B.max().expand_as(widths_B) if pad_to_longest else widths_B


def _share(split: SequenceSplit | None, tokens: int) -> slice:
    return slice(0, tokens) if split is None else split.span(tokens)
