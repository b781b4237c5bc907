"""The executor that runs micro-batches through pipeline stages with PyTorch's pipeline schedules.

A schedule receives only the index of each micro-batch, and the hidden states that are passed from stage to
stage. All hidden states must have the same shape. So every micro-batch of a step is padded to the same number
of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tandem.engines.train.base import Counts, LossFn
from tandem.engines.train.execution import Execution, Run, synchronize
from tandem.engines.train.microbatch import MicroBatch
from tandem.engines.train.module import Settings
from tandem.engines.train.routers import Routers
from tandem.engines.train.stages import Stages
from tandem.errors import TandemError
from tandem.models.pipeline import HIDDEN
from tandem.models.policy import PackedModel
from tandem.observability.metrics import Metric, Metrics

SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
# Without gradients, this many micro-batches per stage run in one schedule. With more micro-batches, stages
# wait for a smaller fraction of the time, but all hidden states are kept until the last micro-batch ends.
_PER_STAGE = 4


class Pipelined(Execution):
    """An executor that runs micro-batches through the pipeline stages; see `Execution`.

    Args:
        module: the sharded model of this rank's stage.
        root: the root FSDP unit of the module.
        settings: the engine's config sections, which name the schedule of a training step.
        stages: the pipeline stages of the model.
        routers: the routers of the model's mixtures, which are not observed.
        each: True: gradients are reduced in every micro-batch. False: gradients are reduced only in the last
            micro-batch.
    """

    def __init__(
        self,
        module: PackedModel,
        root: FSDPModule,
        settings: Settings,
        stages: Stages,
        *,
        routers: Routers,
        each: bool,
    ) -> None:
        super().__init__(module, root, settings.device, routers=routers, each=each)
        self._stages, self._pipeline, self._settings = stages, stages.pipeline, settings

    def outputs(self, parts: Iterable[MicroBatch], wanted: frozenset[str]) -> Iterator[Run]:
        """Yield each micro-batch together with the model's outputs, on all stages; see `Execution`."""
        self._module.check_outputs(wanted)  # on every stage, or the other stages would hang
        remaining, last = iter(parts), self._pipeline.size - 1
        while lot := list(islice(remaining, _PER_STAGE * self._pipeline.size)):
            found = self._run(ScheduleGPipe, lot, wanted) or [{}] * len(lot)
            for part, out in zip(lot, found, strict=True):
                told: dict[str, Tensor] = {}
                for name in sorted(wanted):
                    empty = torch.empty(part.inputs.total, dtype=self._settings.output, device=self._device)
                    told[name] = self._pipeline.broadcast(out.get(name, empty).contiguous(), last)
                yield part, told

    def gradients(self, parts: Sequence[MicroBatch], loss: LossFn, counts: Counts) -> tuple[Metrics, Tensor]:
        """Run forward and backward passes of all micro-batches; see `Execution`.

        Only the last stage computes the loss.
        """
        self._module.check_outputs(loss.outputs)
        found: list[Metrics] = []
        total = torch.zeros((), dtype=torch.float64, device=self._device)

        def share_of(out: Mapping[str, Tensor], part: MicroBatch) -> Tensor:
            share, metrics = loss(out, part.columns, part.offsets, counts)
            found.append(metrics)
            total.add_(share.detach())
            return share

        self._run(SCHEDULES[self._settings.fsdp.pipeline_schedule], parts, loss.outputs, share_of)
        self._stages.sum_tied()
        return Metrics.merged(found), total

    def broadcast(self, metrics: Metrics, total: Tensor) -> tuple[Metrics, Tensor]:
        """Send the metrics and the loss from the last stage to all stages, through the host."""
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

    def _run(
        self,
        schedule: Any,
        parts: Sequence[MicroBatch],
        wanted: frozenset[str],
        share_of: Callable[[Mapping[str, Tensor], MicroBatch], Tensor] | None = None,
    ) -> list[Mapping[str, Tensor]]:
        """Run micro-batches through a pipeline schedule.

        Args:
            schedule: the class of PyTorch's schedule.
            parts: the micro-batches.
            wanted: names of the outputs.
            share_of: a function that computes the loss of a micro-batch from the outputs of the last stage.
                The backward pass starts from this loss. None: no backward pass.

        Returns:
            On the last stage without a loss, the outputs of each micro-batch. Otherwise an empty list.

        Raises:
            TandemError: the error that `share_of` raised, on the last stage.
        """
        pipeline, trains, found = self._pipeline, share_of is not None, list[Mapping[str, Tensor]]()
        ended = torch.zeros((), dtype=self._settings.output, device=self._device)

        def through(index: int, hidden: Tensor | None) -> Tensor:
            part = parts[index]
            if hidden is not None:
                pipeline.meter.count(hidden.nbytes)
            out: Mapping[str, Tensor] = self._module(replace(part.inputs, hidden=hidden), wanted)
            if not pipeline.last:
                return out[HIDDEN]
            if share_of is not None:
                return share_of(out, part)
            found.append(out)
            return ended

        # The shapes are passed in, so PyTorch needs no trial run to find them.
        shape = 1, len(parts[0].inputs.input_ids), self._module.decoder.config.hidden_size
        hidden = torch.empty(shape, dtype=self._settings.compute, device="meta", requires_grad=trains)
        stage = _Stage(
            _Through(through),
            pipeline.stage,
            pipeline.size,
            self._device,
            input_args=(hidden,) if pipeline.stage else (),
            output_args=ended.to("meta") if pipeline.last else hidden,
            group=pipeline.group,
        )
        stage.root, stage.each = self._root, self._each
        indices, itself = torch.arange(len(parts)), (lambda share, index: share) if trains else None
        made = schedule(stage, len(parts), loss_fn=itself, scale_grads=False)
        target = indices if trains and pipeline.last else None
        try:
            made.step(index=indices, target=target, return_outputs=False)
        except RuntimeError as error:  # PyTorch wraps the error that a stage raised
            if isinstance(error.__cause__, TandemError):
                raise error.__cause__ from None
            raise
        return found


class _Stage(PipelineStage):
    """A pipeline stage that reduces gradients in the last backward pass or in every backward pass."""

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
    """The module that the schedule calls with the index of a micro-batch, and that runs the stage.

    This is not an FSDP module, because the schedule would otherwise set when gradients are reduced.
    """

    def __init__(self, run: Callable[[int, Tensor | None], Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        return self._run(int(index), hidden)
