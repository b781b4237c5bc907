"""Micro-batches through the stages of a pipeline, in the order of one of PyTorch's schedules.

A schedule sees of a micro-batch its index and the hidden states that go from stage to stage, which have one
shape: every micro-batch of a step is filled up to the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tandem.engines.train.base import Counts, LossFn
from tandem.engines.train.execution import synchronize
from tandem.engines.train.microbatch import MicroBatch
from tandem.engines.train.stages import Stages
from tandem.errors import TandemError
from tandem.models.pipeline import HIDDEN
from tandem.models.policy import PackedModel
from tandem.observability.metrics import Metric, Metrics

SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
# Without gradient so many micro-batches per stage go through at once: more wait less for the first to arrive,
# but each one's hidden states are kept until the last is through.
_LOT = 4


class Pipelined:
    """See `Execution`.

    Args:
        module: this rank's stage, sharded.
        root: its FSDP unit.
        stages: its place among the others.
        schedule: of a training step, by name.
        compute_dtype: of hidden states.
        output_dtype: of outputs.
        each: gradients are reduced in every micro-batch, not in the last alone.
    """

    def __init__(
        self,
        module: PackedModel,
        root: FSDPModule,
        stages: Stages,
        schedule: str,
        device: torch.device,
        *,
        compute_dtype: torch.dtype,
        output_dtype: torch.dtype,
        each: bool = False,
    ) -> None:
        self._module, self._root, self._each = module, root, each
        self._stages, self._pipeline = stages, stages.pipeline
        self._schedule = SCHEDULES[schedule]
        self._compute, self._output = compute_dtype, output_dtype
        self._device = device
        self._width: int = module.decoder.config.hidden_size

    def outputs(
        self, parts: Iterable[MicroBatch], wanted: frozenset[str]
    ) -> Iterator[tuple[MicroBatch, Mapping[str, Tensor]]]:
        """See `Execution`; the same on all stages."""
        self._module.check_outputs(wanted)  # on every stage, lest one wait for another that has raised
        remaining = iter(parts)
        while lot := list(islice(remaining, _LOT * self._pipeline.size)):
            found: list[Mapping[str, Tensor]] = []
            self._run(ScheduleGPipe, lot, wanted, partial(self._kept, found), trains=False)
            for index, part in enumerate(lot):
                out = found[index] if found else {}
                yield part, {name: self._from_last(out.get(name), part) for name in sorted(wanted)}

    def gradients(self, parts: Sequence[MicroBatch], loss: LossFn, counts: Counts) -> tuple[Metrics, Tensor]:
        """See `Execution`; the last stage sees the loss."""
        self._module.check_outputs(loss.outputs)
        found: list[Metrics] = []
        total = torch.zeros((), dtype=torch.float64, device=self._device)

        def share_of(out: Mapping[str, Tensor], part: MicroBatch) -> Tensor:
            share, metrics = loss(out, part.columns, part.offsets, counts)
            found.append(metrics)
            total.add_(share.detach())
            return share

        self._run(self._schedule, parts, loss.outputs, share_of, trains=True)
        self._stages.sum_tied()
        return Metrics.merged(found), total

    def told(self, metrics: Metrics, total: Tensor) -> tuple[Metrics, Tensor]:
        """See `Execution`. What the last stage has goes through the host."""
        message = None
        if self._pipeline.last:
            rows = {
                name: (float(m.value), float(m.weight), m.reduction, float(m.squares))
                for name, m in metrics.items()
            }
            message = rows, float(total)
        rows, number = self._pipeline.broadcast_object(message)
        told = Metrics({name: Metric(*row) for name, row in rows.items()})
        return told, torch.tensor(number, dtype=torch.float64, device=self._device)

    def _kept(self, found: list[Mapping[str, Tensor]], out: Mapping[str, Tensor], part: MicroBatch) -> Tensor:
        found.append(out)
        return torch.zeros((), dtype=self._output, device=self._device)

    def _from_last(self, value: Tensor | None, part: MicroBatch) -> Tensor:
        if value is None:
            value = torch.empty(part.inputs.total, dtype=self._output, device=self._device)
        return self._pipeline.broadcast(value.contiguous(), self._pipeline.size - 1)

    def _run(
        self,
        schedule: Any,
        parts: Sequence[MicroBatch],
        wanted: frozenset[str],
        ending: Callable[[Mapping[str, Tensor], MicroBatch], Tensor],
        *,
        trains: bool,
    ) -> None:
        """
        Args:
            ending: makes of the outputs of a micro-batch the scalar that the last stage ends with; where the
                model trains its gradients are taken.

        Raises:
            TandemError: as `ending` raised it, on the last stage.
        """
        pipeline = self._pipeline

        def through(index: int, hidden: Tensor | None) -> Tensor:
            part = parts[index]
            if hidden is not None:
                pipeline.meter.count(hidden.nbytes)
            out = self._module(replace(part.inputs, hidden=hidden), wanted)
            return ending(out, part) if pipeline.last else out[HIDDEN]

        # Given shapes, PyTorch runs nothing to find them out.
        tokens = len(parts[0].inputs.input_ids)
        hidden = torch.empty(1, tokens, self._width, dtype=self._compute, device="meta", requires_grad=trains)
        stage = _Stage(
            _Through(through),
            pipeline.stage,
            pipeline.size,
            self._device,
            input_args=(hidden,) if pipeline.stage else (),
            output_args=torch.empty((), dtype=self._output, device="meta") if pipeline.last else hidden,
            group=pipeline.group,
        )
        stage.root, stage.each = self._root, self._each
        indices = torch.arange(len(parts))
        made = schedule(stage, len(parts), loss_fn=_itself if trains else None, scale_grads=False)
        try:
            made.step(
                index=indices, target=indices if trains and pipeline.last else None, return_outputs=False
            )
        except RuntimeError as error:  # that PyTorch wraps around what a stage raised
            if isinstance(error.__cause__, TandemError):
                raise error.__cause__ from None
            raise


class _Stage(PipelineStage):
    """Gradients meet over the ranks of the stage once, in the last backward, or in each."""

    root: FSDPModule
    each: bool

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if self.has_backward:
            self.root.set_is_last_backward(last_backward)
            synchronize(self.root, last=last_backward, each=self.each)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class _Through(nn.Module):
    """The module that the schedule calls: it runs the stage, by the index of a micro-batch. It is no FSDP
    module, lest the schedule change when gradients meet."""

    def __init__(self, run: Callable[[int, Tensor | None], Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        return self._run(int(index), hidden)


def _itself(share: Tensor, index: Tensor) -> Tensor:
    """The last stage ends with the loss."""
    return share
