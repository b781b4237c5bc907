"""The plan of a step, and a function that converts the plan to input tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.device import to_device
from tandem.engines.rollout.native.paged import StepInput

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one step. Rows are row numbers in `Rows`, the table of sequences.

    Attributes:
        rows: The rows with tokens in this step. The first `decoding` rows have one token each: the last token
            that their sequence generated.
        first: For each row, the number of tokens that are already in the cache.
        counts: For each row, the number of tokens that this step computes.
        levels: For each row, the level of its sequence's rotary angles (see `AngleTables`).
        decoding: The number of rows that decode.
        sampled: The rows that get a new token.
        source: For each row of `sampled`, the index in `rows` whose last token gives its logits.
        copies: Pairs (source, target) of blocks to copy after the step is computed.
    """

    rows: Index
    first: Index
    counts: Index
    levels: Index
    decoding: int
    sampled: Index
    source: Index
    copies: list[tuple[int, int]]

    def apart(self) -> tuple[Plan, ...]:
        """Split the step into one for the decoding rows and one for the prompts.

        The step with the decoding rows comes first, as these rows do in `sampled`. The split pays because
        decode steps have graphs and kernels that cannot run prompts. It is possible because no decoding row
        needs the results of a prompt in the same step. If every prompt also has only one token, the result is
        a single step.
        """
        first = self.decoding
        if not 0 < first < len(self.rows) or self.counts.max() == 1:
            return (self,)
        names = ("rows", "first", "counts", "levels", "sampled", "source")
        decoding, prompts = (
            replace(self, copies=[], **{name: getattr(self, name)[part] for name in names})
            for part in (slice(first), slice(first, None))
        )
        return decoding, replace(prompts, decoding=0, source=prompts.source - first)


def step_input(
    plan: Plan,
    tables: Sequence[NDArray[np.int32]],
    last_token: Index,
    content: Callable[[int], Index],
    block_size: int,
    device: torch.device,
    beside: Sequence[NDArray[np.generic]] = (),
) -> tuple[StepInput, Tensor | None, list[Tensor]]:
    """Build the input of a planned step and send it to the device in one copy.

    Args:
        plan: The step.
        tables: For each group of layers, the block table of every row.
        last_token: The last accepted token of every row. This is the input token of a decoding row.
        content: A function that returns a row's prompt and accepted tokens.
        block_size: The number of tokens per block.
        device: The device.
        beside: Further arrays to send to the device in the same copy.

    Returns:
        The step input. For each row of `plan.sampled`, the index of its logits; None if all logits are used
        in order. The arrays of `beside` on the device.
    """
    lengths_S = plan.first + plan.counts
    max_length = int(lengths_S.max())
    tables_GSB = [table[plan.rows, : -(-max_length // block_size)] for table in tables]
    starts_S1 = np.zeros(len(plan.rows) + 1, dtype=np.int32)
    np.cumsum(plan.counts, out=starts_S1[1:])
    ids_T = last_token[plan.rows[: plan.decoding]]
    owners_T, positions_T, wanted, logits_of = np.arange(len(plan.rows)), plan.first, plan.source, plan.source
    if plan.decoding < len(plan.rows):
        owners_T = np.repeat(owners_T, plan.counts)
        positions_T = np.arange(starts_S1[-1]) + (plan.first - starts_S1[:-1])[owners_T]
        prompts = np.stack((plan.rows, plan.first, plan.counts), 1)[plan.decoding :].tolist()
        chunks = [content(row)[first : first + count] for row, first, count in prompts]
        ids_T = np.concatenate((ids_T, *chunks))
        wanted, logits_of = np.unique(plan.source, return_inverse=True)
    block_T, offset_T = np.divmod(positions_T, block_size)
    slots_GT = [table[owners_T, block_T].astype(np.int64) * block_size + offset_T for table in tables_GSB]
    logits_L = starts_S1[1:][wanted].astype(np.int64) - 1
    shared = [logits_of] if len(logits_of) != len(wanted) else []
    flat = (ids_T, positions_T, plan.levels[owners_T], starts_S1, lengths_S.astype(np.int32), logits_L)
    arrays = (*flat, *slots_GT, *tables_GSB, *shared, *beside)
    sent = iter(to_device([torch.from_numpy(array) for array in arrays], device))
    parts = {name: next(sent) for name in StepInput.__slots__[: len(flat)]}
    step = StepInput(
        **parts,
        slots_GT=tuple(islice(sent, len(tables))),
        tables_GSB=tuple(islice(sent, len(tables))),
        max_query=int(plan.counts.max()),
        max_length=max_length,
    )
    return step, next(sent) if shared else None, list(sent)
