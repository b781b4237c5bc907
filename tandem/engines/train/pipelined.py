"""The execution of micro-batches in pipeline stages, in the order of one of PyTorch's schedules.

For each micro-batch, a schedule sees only its index and the hidden states that pass from stage to stage. The
hidden states must have one shape, so every micro-batch of a step is padded to the same number of tokens.
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
from tandem.engines.train.stages import Stages
from tandem.errors import TandemError
from tandem.models.pipeline import HIDDEN
from tandem.models.policy import PackedModel
from tandem.observability.metrics import Metric, Metrics

SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
# Without gradients, this many micro-batches per stage run in one schedule. With more of them, stages wait
# less for the first one to arrive, but all hidden states are kept until the last one has finished.
_PER_STAGE = 4


class Pipelined(Execution):
    """An executor that runs micro-batches through the pipeline stages; see `Execution`.

    Args:
        module: the model of this rank's stage, sharded.
        root: the root FSDP unit of the module.
        settings: config sections, which contain the schedule of a training step.
        stages: the place of this stage among the others.
        each: True: gradients are reduced in every micro-batch. False: in the last one only.
    """

    def __init__(
        self, module: PackedModel, root: FSDPModule, settings: Settings, stages: Stages, *, each: bool
    ) -> None:
        super().__init__(module, root, settings.device, each=each)
        self._stages, self._pipeline, self._settings = stages, stages.pipeline, settings

    def outputs(self, parts: Iterable[MicroBatch], wanted: frozenset[str]) -> Iterator[Run]:
        """Yield each micro-batch with the model's outputs for it, on all stages; see `Execution`."""
        self._module.check_outputs(wanted)  # on every stage: if one stage raises alone, the others hang
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
        """Run forward and backward for all micro-batches; see `Execution`.

        Only the last stage sees the loss.
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
        """Run the micro-batches through a schedule.

        Args:
            schedule: class of the PyTorch schedule.
            parts: the micro-batches.
            wanted: names of the outputs.
            share_of: computes the loss of a micro-batch from the outputs of the last stage. Gradients are
                taken of this loss. None: no gradients.

        Returns:
            The outputs of each micro-batch on the last stage if there is no loss; otherwise an empty list.

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

        # PyTorch needs no trial run to find the shapes, because they are passed in.
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
    """A pipeline stage that reduces gradients over its ranks in the last backward pass, or in each."""

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
    """The module that the schedule calls. It runs the stage for the index of a micro-batch.

    It is not an FSDP module, because the schedule would then change when gradients are reduced.
    """

    def __init__(self, run: Callable[[int, Tensor | None], Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, hidden: Tensor | None = None, *, index: Tensor) -> Tensor:
        return self._run(int(index), hidden)
