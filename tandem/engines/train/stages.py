"""A class that gives each pipeline stage access to the weights of the whole model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.engines.train.gradients import gradient_norm
from tandem.models.pipeline import Pipeline
from tandem.models.policy import PackedModel
from tandem.models.tensor_group import local
from tandem.models.weight_files import persistent_buffers


class Stages:
    """The weights of a whole model whose layers are divided into pipeline stages.

    The constructor removes the layers of other stages from the whole model, in place. Create the instance
    before the model is sharded.

    Args:
        pipeline: the pipeline of this rank.
        module: the whole model, not yet sharded.

    Attributes:
        pipeline: the pipeline of this rank.
        shapes: a dict from Hugging Face name to the shape of each weight of the whole model. It is the same
            on all ranks.
        constants: the names of the persistent buffers of the whole model, which `shapes` contains too.
    """

    def __init__(self, pipeline: Pipeline, module: PackedModel) -> None:
        self.pipeline, self._module = pipeline, module
        self.constants = frozenset(map(module.hf_name, persistent_buffers(module)))
        self.shapes, self._owners, self._tied = pipeline.cut(module)

    def has(self, name: str) -> bool:
        """Return whether this stage is the stage that broadcasts a weight."""
        return self._owners[name] == self.pipeline.stage

    def sent(self, name: str, value: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Broadcast a whole weight from its stage to all stages, and return it.

        Collective over the pipeline.

        Args:
            name: Hugging Face name of the weight.
            value: the weight. None on stages that do not have it.
            dtype: dtype of the weight.
            device: device on which the other stages receive the weight.
        """
        if value is None:
            value = torch.empty(self.shapes[name], dtype=dtype, device=device)
        return self.pipeline.broadcast(value.contiguous(), self._owners[name])

    def completed(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values in `sums`, with zeros added for the weights of the other stages.

        For a tied weight, which two stages have, the second stage returns zero.

        Args:
            sums: a dict from the name of each weight of this stage to a number.
        """
        zero = torch.zeros_like(next(iter(sums.values())))
        return {name: sums[name] if self.has(name) else zero for name in self.shapes}

    def sum_tied(self) -> None:
        """Sum the gradients of a tied embedding and output head over the first and the last stage.

        Afterwards both stages have the same gradient, so their copies of the matrix stay equal bit by bit.
        Collective over these two stages.
        """
        weight = self._module.decoder.embed_tokens.weight
        if self._tied and weight is not None and weight.grad is not None:
            self.pipeline.meter.all_reduce(local(weight.grad), group=self.pipeline.ends)

    def gradient_norm(self) -> Tensor:
        """Return the gradient norm over all stages; see `gradient_norm` in gradients.py. Collective."""
        twice = self._module.decoder.embed_tokens.weight if self.pipeline.last and self._tied else None
        square = gradient_norm(p for p in self._module.parameters() if p is not twice).square()
        self.pipeline.meter.all_reduce(square, group=self.pipeline.group)
        return square.sqrt()
