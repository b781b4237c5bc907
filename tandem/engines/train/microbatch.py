"""The cut of one rank's share of a mini-batch into micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.balance import within_budget
from tandem.device import to_device
from tandem.engines.train.base import JUDGED, REFERENCE, Counts, MicroBatching
from tandem.engines.weight_sync import buckets
from tandem.errors import NoTokensError
from tandem.models.collectives import CollectiveMeter
from tandem.models.packing import PackedInputs, input_lengths, pack
from tandem.protocol import DataProto, Ragged

# On a CPU larger micro-batches are not faster, as their activations leave the caches (measured: 5%
# slower at 18,000 tokens than at 4,000), and only take memory.
CPU_BLOCK_TOKENS = 4096


def global_counts(batch: DataProto, meter: CollectiveMeter, group: dist.ProcessGroup) -> Counts:
    """Denominators of the global mini-batch, counted on the host. Collective.

    Args:
        batch: this rank's share.
        group: the ranks with other rows.

    Raises:
        NoTokensError: no token counts.
    """
    mask = batch.ragged("response_mask")
    tokens = int(mask.values.sum())
    answered = torch.zeros(len(mask), dtype=torch.bool)
    answered[mask.row_ids()[mask.values].cpu()] = True
    both = torch.tensor([tokens, int(answered.sum())])
    meter.all_reduce(both, group=group)
    if int(both[0]) == 0:
        raise NoTokensError("no response token in the whole mini-batch", field="response_mask")
    return Counts(tokens=int(both[0]), sequences=int(both[1]))


def cut_alike(
    lengths: Sequence[int],
    micro: MicroBatching,
    meter: CollectiveMeter,
    *,
    block_tokens: int | None = None,
    least: int = 1,
) -> list[list[int]]:
    """`cut` on every rank into the same number of micro-batches, at least `least`, as ranks wait for each
    other in each. Under a token budget a rank that needs fewer makes its own smaller: ranks with about as
    many tokens then have equal ones at every turn. Where rows are too few, or the rule leaves no choice,
    empty ones are added, which run as ghosts. Collective, on the host.

    Raises:
        ConfigError: see `cut`.
    """
    parts = _spread(cut(lengths, micro, block_tokens=block_tokens), lengths, least)
    most = most_of_ranks(max(least, len(parts)), meter)
    if micro.max_tokens is not None:
        if len(parts) < most:
            parts = _spread(cut(lengths, micro, block_tokens=block_tokens, at_least=most), lengths, least)
        most = most_of_ranks(max(least, len(parts)), meter)
    return parts + [[] for _ in range(most - len(parts))]


def most_of_ranks(number: int, meter: CollectiveMeter | None = None) -> int:
    """Of all ranks' numbers the largest. Collective, on the host.

    Args:
        meter: counts the exchange; None: nobody does.
    """
    largest = torch.tensor(number)
    (meter or CollectiveMeter()).all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def cut(
    lengths: Sequence[int], micro: MicroBatching, *, block_tokens: int | None = None, at_least: int = 1
) -> list[list[int]]:
    """Rows of each micro-batch. Sequences of like length share one where the rule leaves a choice,
    and stand longest first within it; the micro-batch with the longest sequences comes first, so that
    what needs most memory is known at once.

    Args:
        lengths: tokens of each row of the share.
        block_tokens: cut further where a micro-batch would hold more tokens than this (one long
            sequence may).
        at_least: micro-batches to make under a token budget, if there are as many rows.

    Raises:
        ConfigError: a row alone exceeds the token budget.
    """
    assert micro.max_samples is None or micro.max_tokens is None, micro

    def longest_first(rows: Iterable[int]) -> list[int]:
        return sorted(rows, key=lambda row: (-lengths[row], row))

    if micro.max_tokens is not None:
        parts = [longest_first(rows) for rows in within_budget(lengths, micro.max_tokens, at_least)]
        parts.sort(key=lambda rows: (-lengths[rows[0]], rows[0]))
    else:
        ordered = longest_first(range(len(lengths)))
        size = micro.max_samples or len(ordered)
        parts = [ordered[start : start + size] for start in range(0, len(ordered), max(1, size))]
    if block_tokens is None:
        return parts
    sizes = ({row: lengths[row] for row in rows} for rows in parts)
    return [list(block) for each in sizes for block in buckets(each, block_tokens)]


def _spread(parts: list[list[int]], lengths: Sequence[int], least: int) -> list[list[int]]:
    """At least so many micro-batches, where there are as many rows: the largest is cut in two, as often as it
    takes.

    Args:
        parts: rows of each, longest first.
        lengths: tokens of each row of the share.
    """
    parts = list(parts)
    while len(parts) < least:
        tokens = [sum(lengths[row] for row in rows) if len(rows) > 1 else 0 for rows in parts]
        if not any(tokens):
            break
        at = tokens.index(max(tokens))
        rows = parts[at]
        parts[at : at + 1] = rows[::2], rows[1::2]
    return parts


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Attributes:
    rows: the share's rows in it; none for a ghost.
    inputs: what the model takes.
    columns: the loss's columns, flat over the rows' tokens.
    offsets: (B+1) int64, of the sequences; all on the model's device.
    lengths: tokens per row, on the host.
    """

    rows: list[int]
    inputs: PackedInputs
    columns: dict[str, Tensor]
    offsets: Tensor
    lengths: Tensor


def assemble(
    batch: DataProto,
    rows: list[int],
    columns: frozenset[str],
    *,
    device: torch.device,
    whole: bool = False,
    **laid: Any,
) -> MicroBatch:
    """One micro-batch on the model's device. No rows make a ghost: one sequence of one token, whose
    columns are all zero, its `response_mask` false. It takes part in every collective and adds nothing.

    Args:
        batch: the rank's share, with `tokens`; unless every token's outcome is wanted, `response_mask`;
            where a row holds several sequences, `sequence_lengths`; `ref_hidden` where it is to be compared;
            for a model that judges more than last tokens, `judged_tokens`.
        columns: ragged or dense columns for the loss.
        whole, laid: the options of `pack`.

    Raises:
        DataError: a column that is not there.
    """
    part = batch[rows] if rows else _ghost(batch)
    tokens = sequences(part) if rows else part.ragged("tokens")
    asked = JUDGED if whole else "response_mask"
    wanted = part.ragged(asked).values.cpu() if asked in part else None
    names = sorted(columns)
    inputs = pack(tokens.to("cpu"), wanted, device=device, whole=whole, **laid)
    if REFERENCE in part:
        hidden_TD = part.ragged(REFERENCE).values.to(device)
        inputs = replace(inputs, reference=hidden_TD.index_select(0, inputs.places))
    offsets, *values = to_device([tokens.offsets, *(flat(part, name) for name in names)], device)
    return MicroBatch(
        rows=rows,
        inputs=inputs,
        columns=dict(zip(names, values, strict=True)),
        offsets=offsets,
        lengths=part.ragged("tokens").lengths,
    )


def most_tokens(
    batch: DataProto, parts: Sequence[Sequence[int]], *, pad_to_longest: bool = False, whole: bool = False
) -> int:
    """Tokens that the model sees of the largest of these micro-batches; at least the one of a ghost.

    Args:
        batch, pad_to_longest, whole: see `assemble`.
        parts: rows of each.
    """
    kept = batch.select(sorted({"tokens", "sequence_lengths"} & set(batch.batch)), ())
    laid = {"pad_to_longest": pad_to_longest, "whole": whole}
    inputs = (input_lengths(sequences(kept[list(rows)]).lengths, **laid) for rows in parts if rows)
    return max((int(lengths_B.sum()) for lengths_B in inputs), default=1)


def sequences(batch: DataProto) -> Ragged:
    """The sequences that the model sees, one after the other: a row's `tokens` each, or, where there is a
    column `sequence_lengths`, ragged int64, as many in each row as it has entries."""
    tokens = batch.ragged("tokens")
    if "sequence_lengths" not in batch:
        return tokens
    return Ragged.from_lengths(tokens.values, batch.ragged("sequence_lengths").values)


def flat(part: DataProto, name: str) -> Tensor:
    """A column as a loss takes it: the values of all rows in succession, or one for each row."""
    return part.dense(name) if isinstance(part.batch.get(name), Tensor) else part.ragged(name).values


def _ghost(batch: DataProto) -> DataProto:
    """One row in the image of the batch's columns."""
    row: dict[str, Tensor | Ragged] = {}
    for name, column in batch.batch.items():
        values = column.values if isinstance(column, Ragged) else column
        zero = values.new_zeros((1, *values.shape[1:]))
        row[name] = Ragged.from_lengths(zero, [1]) if isinstance(column, Ragged) else zero
    return DataProto(row)
