"""Functions that split one rank's shard of a mini-batch into micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.balance import within_budget, within_padded_budget
from tandem.device import to_device
from tandem.engines.train.base import JUDGED, REFERENCE, Counts, MicroBatching
from tandem.engines.weight_sync import buckets
from tandem.errors import NoTokensError
from tandem.models.collectives import CollectiveMeter
from tandem.models.packing import PackedInputs, input_lengths, pack
from tandem.models.policy import PackedModel
from tandem.models.routing import ROUTED, Routing
from tandem.models.sequence_parallel import SequenceSplit
from tandem.protocol import DataProto, Ragged

# On a CPU, larger micro-batches need more memory and are not faster, because their activations do not fit
# into the caches (measured: 5% slower at 18,000 tokens than at 4,000).
CPU_BLOCK_TOKENS = 4096


def global_counts(batch: DataProto, meter: CollectiveMeter, group: dist.ProcessGroup) -> Counts:
    """Count the loss's denominators over the global mini-batch, on the host. Collective.

    Args:
        batch: this rank's shard of the mini-batch.
        meter: the meter for the collective.
        group: the process group of the ranks with different rows.

    Raises:
        NoTokensError: the whole mini-batch has no response token.
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


def micro_batches(
    batch: DataProto,
    columns: frozenset[str],
    rule: MicroBatching,
    *,
    module: PackedModel,
    split: SequenceSplit | None,
    stages: int,
    padded: bool,
    meter: CollectiveMeter,
    device: torch.device,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one rank's rows, the same number on every rank. Collective.

    Args:
        batch: the rank's rows; see `assemble`.
        columns: the names of the columns for the loss.
        rule: the rule for the micro-batches.
        module: the model.
        split: the ranks that share the tokens of each micro-batch.
        stages: the number of pipeline stages.
        padded: whether sequences are padded to the longest of their micro-batch.
        meter: the meter for the collectives.
        device: the model's device.
    """
    kept = {"response_mask", "sequence_lengths", REFERENCE, JUDGED} | module.replays
    batch = batch.select(sorted({"tokens", *columns, *(kept & set(batch.batch))}), ())
    lengths = batch.ragged("tokens").lengths.tolist()
    block_tokens = CPU_BLOCK_TOKENS if device.type == "cpu" else None
    rule = rule if split is None else rule.over(split.size)
    sizes: Any = {"block_tokens": block_tokens, "least": stages, "padded": padded or module.in_rows}
    parts = cut_alike(lengths, rule, meter, **sizes)
    layout = {"pad_to_longest": padded, "whole": module.whole_sequences}
    fill = most_tokens(batch, parts, **layout) if stages > 1 else 0
    layout |= {"origins": module.mixtures.layers > 0}
    for rows in parts:
        yield assemble(batch, rows, columns, device=device, split=split, fill=fill, **layout)


def cut_alike(
    lengths: Sequence[int],
    micro: MicroBatching,
    meter: CollectiveMeter,
    *,
    block_tokens: int | None = None,
    least: int = 1,
    padded: bool = False,
) -> list[list[int]]:
    """Split the rows into micro-batches, the same number on every rank. Collective, on the host.

    The number must be the same, because ranks wait for each other in each micro-batch. It is at least
    `least`. With a token budget, a rank that needs fewer micro-batches makes smaller micro-batches. So ranks
    with similar token counts always run micro-batches of similar sizes at the same time. If a rank has too
    few rows, or a fixed number of samples per micro-batch, empty micro-batches are added. These run as
    ghosts, which are placeholders without rows.

    Args:
        lengths: the number of tokens of each row.
        micro: the rule for the micro-batches.
        meter: the meter for the collective.
        block_tokens: see `cut`.
        least: the minimum number of micro-batches.
        padded: see `cut`.

    Raises:
        ConfigError: see `cut`.
    """
    way = partial(cut, lengths, micro, block_tokens=block_tokens, padded=padded)
    parts = _spread(way(), lengths, least)
    most = most_of_ranks(max(least, len(parts)), meter)
    if micro.max_tokens is not None:
        if len(parts) < most:
            parts = _spread(way(at_least=most), lengths, least)
        most = most_of_ranks(max(least, len(parts)), meter)
    return parts + [[] for _ in range(most - len(parts))]


def most_of_ranks(number: int, meter: CollectiveMeter | None = None) -> int:
    """Return the maximum of a number over all ranks. Collective, on the host.

    Args:
        number: this rank's number.
        meter: the meter for the collective. None: the collective is not measured.
    """
    largest = torch.tensor(number)
    (meter or CollectiveMeter()).all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def cut(
    lengths: Sequence[int],
    micro: MicroBatching,
    *,
    block_tokens: int | None = None,
    at_least: int = 1,
    padded: bool = False,
) -> list[list[int]]:
    """Split rows into micro-batches, and return the row indices of each micro-batch.

    As far as the rule permits, sequences of similar length are put into the same micro-batch. Within a
    micro-batch, the longest sequence is first. The micro-batch with the longest sequences is first, so that a
    lack of memory is detected immediately.

    Args:
        lengths: the number of tokens of each row.
        micro: the rule for the micro-batches.
        block_tokens: maximum number of tokens of a micro-batch. Larger micro-batches are split further. A
            single long sequence may still have more tokens. None: no maximum.
        at_least: minimum number of micro-batches with a token budget, if there are enough rows.
        padded: whether each row of a micro-batch is padded to the longest. The token budget then counts the
            padding, and rows of similar length are put together.

    Raises:
        ConfigError: a single row exceeds the token budget.
    """
    assert micro.max_samples is None or micro.max_tokens is None, micro

    def longest_first(rows: Iterable[int]) -> list[int]:
        return sorted(rows, key=lambda row: (-lengths[row], row))

    if micro.max_tokens is not None:
        if padded:
            parts = _spread(within_padded_budget(lengths, micro.max_tokens), lengths, at_least)
        else:
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
    """Split micro-batches until their number is at least `least`, if there are enough rows.

    In each iteration, the largest micro-batch is split into two.

    Args:
        parts: row indices of each micro-batch, longest row first.
        lengths: the number of tokens of each row.
        least: the minimum number of micro-batches.
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
    """The inputs of one micro-batch, for the model and for the loss.

    Attributes:
        rows: the indices of the micro-batch's rows in the rank's batch. Empty for a ghost.
        inputs: the model's inputs.
        columns: the columns for the loss, flat over the tokens of all rows.
        offsets: (B+1) int64, offsets of the sequences, on the model's device like `inputs` and `columns`.
        lengths: number of tokens per row, on the host.
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
    **options: Any,
) -> MicroBatch:
    """Build one micro-batch on the model's device.

    Without rows, this function builds a ghost: a placeholder with one sequence of one token. Its columns are
    zero and its `response_mask` is false. The rank then takes part in every collective, but adds nothing to
    the loss.

    Args:
        batch: the rank's rows. The column `tokens` is required. `response_mask` limits the outputs to
            response tokens. `sequence_lengths` is needed if a row contains several sequences, `ref_hidden`
            for the exact KL to the reference policy, and `judged_tokens` for a model that scores other tokens
            than the last. `routed_experts` sets the experts that compute each token.
        rows: the row indices of the micro-batch.
        columns: the names of ragged or dense columns for the loss.
        device: the model's device.
        whole: see `pack`.
        options: further options of `pack`.

    Raises:
        DataError: a column is missing.
    """
    part = batch[rows] if rows else _ghost(batch)
    tokens = sequences(part) if rows else part.ragged("tokens")
    asked = JUDGED if whole else "response_mask"
    wanted = part.ragged(asked).values.cpu() if asked in part else None
    names = sorted(columns)
    inputs = pack(tokens.to("cpu"), wanted, device=device, whole=whole, **options)
    if REFERENCE in part:
        hidden_TD = part.ragged(REFERENCE).values.to(device)
        inputs = replace(inputs, reference=hidden_TD.index_select(0, inputs.places))
    if ROUTED in part:
        assert inputs.origins is not None
        replayed_TLK = part.ragged(ROUTED).values.to(device)
        replayed_NLK = replayed_TLK.index_select(0, inputs.origins.clamp(min=0))  # padding has any experts
        inputs = replace(inputs, routing=Routing(replayed_NLK))
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
    """Return the number of input tokens of the largest micro-batch; at least 1, as in a ghost.

    Args:
        batch: see `assemble`.
        parts: row indices of each micro-batch.
        pad_to_longest: see `pack`.
        whole: see `pack`.
    """
    kept = batch.select(sorted({"tokens", "sequence_lengths"} & set(batch.batch)), ())
    options = {"pad_to_longest": pad_to_longest, "whole": whole}
    inputs = (input_lengths(sequences(kept[list(rows)]).lengths, **options) for rows in parts if rows)
    return max((int(lengths_B.sum()) for lengths_B in inputs), default=1)


def sequences(batch: DataProto) -> Ragged:
    """Return the sequences of a batch, in order.

    Each row's `tokens` are one sequence, unless the batch has a column `sequence_lengths` (ragged int64).
    Then a row has as many sequences as this column has entries in the row.
    """
    tokens = batch.ragged("tokens")
    if "sequence_lengths" not in batch:
        return tokens
    return Ragged.from_lengths(tokens.values, batch.ragged("sequence_lengths").values)


def flat(part: DataProto, name: str) -> Tensor:
    """Return a column as the tensor that a loss receives: flat over all rows, or one value per row."""
    return part.dense(name) if isinstance(part.batch.get(name), Tensor) else part.ragged(name).values


def _ghost(batch: DataProto) -> DataProto:
    """Return one row of zeros with the same columns as the batch."""
    row: dict[str, Tensor | Ragged] = {}
    for name, column in batch.batch.items():
        values = column.values if isinstance(column, Ragged) else column
        zero = values.new_zeros((1, *values.shape[1:]))
        row[name] = Ragged.from_lengths(zero, [1]) if isinstance(column, Ragged) else zero
    return DataProto(row)
