"""The weights and gradients of a model in pipeline stages, seen as a whole from each of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.engines.train.gradients import gradient_norm
from tandem.models.pipeline import Pipeline
from tandem.models.policy import PackedModel
from tandem.models.tensor_group import local


class Stages:
    """Cuts a whole model down to this rank's stage, in place, and knows what the others have.

    Args:
        pipeline: this rank's place.
        module: whole; before it is sharded.

    Attributes:
        pipeline: see above.
        shapes: of all weights of the model by Hugging Face name; the same on all ranks.
    """

    def __init__(self, pipeline: Pipeline, module: PackedModel) -> None:
        self.pipeline, self._module = pipeline, module
        self.shapes, self._owners, self._tied = pipeline.cut(module)

    def has(self, name: str) -> bool:
        """Whether this stage is the one that a weight comes from."""
        return self._owners[name] == self.pipeline.stage

    def sent(self, name: str, value: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The whole weight, on all stages. Collective.

        Args:
            value: None where this stage has it not.
        """
        if value is None:
            value = torch.empty(self.shapes[name], dtype=dtype, device=device)
        return self.pipeline.broadcast(value.contiguous(), self._owners[name])

    def completed(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This stage's numbers by name, and zeros for the other stages' weights; a weight that two stages
        have counts in the first."""
        zero = torch.zeros_like(next(iter(sums.values())))
        return {name: sums[name] if self.has(name) else zero for name in self.shapes}

    def sum_tied(self) -> None:
        """Makes the gradient of a matrix that embedding and output head share the sum of both stages', in
        both: they stay equal, bit by bit. Collective over these two."""
        weight = self._module.decoder.embed_tokens.weight
        if self._tied and weight is not None and weight.grad is not None:
            self.pipeline.meter.all_reduce(local(weight.grad), group=self.pipeline.ends)

    def gradient_norm(self) -> Tensor:
        """See `gradient_norm`; of all stages. Collective."""
        twice = self._module.decoder.embed_tokens.weight if self.pipeline.last and self._tied else None
        square = gradient_norm(p for p in self._module.parameters() if p is not twice).square()
        self.pipeline.meter.all_reduce(square, group=self.pipeline.group)
        return square.sqrt()
