"""A step as the scheduler plans it, and as the tensors that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.device import upload
from tandem.engines.rollout.native.paged import StepInput

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, by rows of the table of sequences.

    Attributes:
        rows: those with tokens in this step; the first `decoding` of them have one each, the last that
            they wrote.
        first: how many of each one's tokens are in the cache already.
        counts: how many tokens of each are computed.
        sampled: rows that get a token.
        source: for each of `sampled`, which of `rows` gives its logits, those after its last token.
        copies: (source, target) blocks to copy once the step is computed.
    """

    rows: Index
    first: Index
    counts: Index
    decoding: int
    sampled: Index
    source: Index
    copies: tuple[list[int], list[int]]


def step_input(
    plan: Plan,
    tables: NDArray[np.int32],
    last_token: Index,
    content: Callable[[int], Index],
    block_size: int,
    device: torch.device,
) -> tuple[StepInput, Index]:
    """The input of a planned step.

    Args:
        tables: of every row, the blocks that it holds.
        last_token: of every row, the last that was accepted for it: what a row that decodes computes.
        content: gives a row's prompt and what was accepted for it.

    Returns:
        The input, and which of its logits each of `plan.sampled` gets.
    """
    lengths_S = plan.first + plan.counts
    max_length = int(lengths_S.max())
    tables_SB = tables[plan.rows, : -(-max_length // block_size)]
    starts_S1 = np.zeros(len(plan.rows) + 1, dtype=np.int32)
    np.cumsum(plan.counts, out=starts_S1[1:])
    ids_T = last_token[plan.rows[: plan.decoding]]
    owners_T, positions_T, wanted, logits_of = np.arange(len(plan.rows)), plan.first, plan.source, plan.source
    if plan.decoding < len(plan.rows):
        owners_T = np.repeat(owners_T, plan.counts)
        positions_T = np.arange(starts_S1[-1]) + (plan.first - starts_S1[:-1])[owners_T]
        chunks = [
            content(row)[first : first + count]
            for row, first, count in zip(
                plan.rows[plan.decoding :].tolist(),
                plan.first[plan.decoding :].tolist(),
                plan.counts[plan.decoding :].tolist(),
                strict=True,
            )
        ]
        ids_T = np.concatenate((ids_T, *chunks))
        wanted, logits_of = np.unique(plan.source, return_inverse=True)
    block_T, offset_T = np.divmod(positions_T, block_size)
    slots_T = tables_SB[owners_T, block_T].astype(np.int64) * block_size + offset_T
    step = StepInput(
        ids_T=upload(ids_T, device),
        positions_T=upload(positions_T, device),
        slots_T=upload(slots_T, device),
        starts_S1=upload(starts_S1, device),
        lengths_S=upload(lengths_S.astype(np.int32), device),
        tables_SB=upload(tables_SB, device),
        logits_L=upload(starts_S1[1:][wanted].astype(np.int64) - 1, device),
        max_query=int(plan.counts.max()),
        max_length=max_length,
    )
    return step, logits_of
