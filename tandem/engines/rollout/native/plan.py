"""A plan of the scheduler as the tensors that a step runs on."""

from __future__ import annotations

import numpy as np
import torch

from tandem.engines.rollout.draws.rows import Rows
from tandem.engines.rollout.native.paged import StepInput
from tandem.engines.rollout.native.scheduler import Index, Plan, Scheduler
from tandem.engines.rollout.transfer import to_device


def step_input(
    plan: Plan, scheduler: Scheduler, rows: Rows, block_size: int, device: torch.device
) -> tuple[StepInput, Index]:
    """The step's input, and which of its logits each of `plan.sampled` gets. The ids of rows that decode are
    the last that were accepted for them."""
    lengths_S = plan.first + plan.counts
    max_length = int(lengths_S.max())
    tables_SB = scheduler.tables[plan.rows, : scheduler.blocks_for(max_length)]
    starts_S1 = np.zeros(len(plan.rows) + 1, dtype=np.int32)
    np.cumsum(plan.counts, out=starts_S1[1:])
    ids_T = rows.last_token[plan.rows[: plan.decoding]]
    owners_T, positions_T, wanted, logits_of = np.arange(len(plan.rows)), plan.first, plan.source, plan.source
    if plan.decoding < len(plan.rows):
        owners_T = np.repeat(owners_T, plan.counts)
        positions_T = np.arange(starts_S1[-1]) + (plan.first - starts_S1[:-1])[owners_T]
        chunks = [
            scheduler.content(row)[first : first + count]
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
        ids_T=to_device(ids_T, device),
        positions_T=to_device(positions_T, device),
        slots_T=to_device(slots_T, device),
        starts_S1=to_device(starts_S1, device),
        lengths_S=to_device(lengths_S.astype(np.int32), device),
        tables_SB=to_device(tables_SB, device),
        logits_L=to_device(starts_S1[1:][wanted].astype(np.int64) - 1, device),
        max_query=int(plan.counts.max()),
        max_length=max_length,
    )
    return step, logits_of
