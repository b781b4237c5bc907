"""Tools for a model in pipeline stages that give each stage a view of the whole model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.engines.train.gradients import gradient_norm
from tandem.models.pipeline import Pipeline
from tandem.models.policy import PackedModel
from tandem.models.tensor_group import local


class Stages:
    """The weights of a model that is cut into pipeline stages, seen as one whole from each stage.

    Creating an instance cuts the whole model in place down to this rank's stage, before the model is sharded.

    Args:
        pipeline: the place of this rank in the pipeline.
        module: the whole model, not yet sharded.

    Attributes:
        pipeline: see above.
        shapes: the shapes of all weights of the whole model, by Hugging Face name. They are the same on all
            ranks.
    """

    def __init__(self, pipeline: Pipeline, module: PackedModel) -> None:
        self.pipeline, self._module = pipeline, module
        self.shapes, self._owners, self._tied = pipeline.cut(module)

    def has(self, name: str) -> bool:
        """Return whether this stage is the source of a weight."""
        return self._owners[name] == self.pipeline.stage

    def sent(self, name: str, value: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the whole weight on all stages: its source stage broadcasts it.

        Collective over the pipeline.

        Args:
            name: Hugging Face name of the weight.
            value: the weight. None on stages that do not have it.
            dtype: type of the weight.
            device: device on which the other stages receive the weight.
        """
        if value is None:
            value = torch.empty(self.shapes[name], dtype=dtype, device=device)
        return self.pipeline.broadcast(value.contiguous(), self._owners[name])

    def completed(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of this stage, with zeros for the weights of the other stages.

        A weight that two stages hold counts on the first of them only.

        Args:
            sums: a number for each weight of this stage, by name.
        """
        zero = torch.zeros_like(next(iter(sums.values())))
        return {name: sums[name] if self.has(name) else zero for name in self.shapes}

    def sum_tied(self) -> None:
        """Sum the gradients of a matrix that embedding and output head share, on both of its stages.

        Afterwards both stages hold the same sum, so their copies of the matrix stay equal bit by bit.
        Collective over these two stages.
        """
        weight = self._module.decoder.embed_tokens.weight
        if self._tied and weight is not None and weight.grad is not None:
            self.pipeline.meter.all_reduce(local(weight.grad), group=self.pipeline.ends)

    def gradient_norm(self) -> Tensor:
        """Return the gradient norm of all stages; see `gradient_norm` in gradients.py. Collective."""
        twice = self._module.decoder.embed_tokens.weight if self.pipeline.last and self._tied else None
        square = gradient_norm(p for p in self._module.parameters() if p is not twice).square()
        self.pipeline.meter.all_reduce(square, group=self.pipeline.group)
        return square.sqrt()
