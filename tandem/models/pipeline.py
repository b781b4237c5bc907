"""Pipeline parallelism: the ranks of each stage have some consecutive layers of the model.

A micro-batch goes through the stages one after the other (Huang et al. 2018, "GPipe",
https://arxiv.org/abs/1811.06965). The first stage starts with the embedding. The last stage ends with the
norm and the head. If embedding and head share one matrix (tied weights), both stages have this matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tandem.config.model import STAGED
from tandem.errors import ConfigError
from tandem.models.collectives import CollectiveMeter
from tandem.models.packing import PackedInputs
from tandem.models.parallel import collective_timeout, require_kind
from tandem.models.policy import PackedModel, hidden_states
from tandem.models.weight_files import stored_tensors

FIELD = "fsdp_config.pipeline_parallel_size"
HIDDEN = "hidden"
"""The name of the output of every stage except the last, (1, N, D) hidden states."""


def check_pipeline(config: Any, stages: int) -> None:
    """Check that a model can be divided into pipeline stages.

    Args:
        config: a transformers config of a language model.
        stages: the number of stages.

    Raises:
        ModelError: If the architecture cannot be divided.
        ConfigError: If there are more stages than layers.
    """
    text = config.get_text_config()
    require_kind(text.model_type, STAGED, FIELD, stages)
    if stages > text.num_hidden_layers:
        raise ConfigError(
            "there are more stages than the model has layers",
            field=FIELD,
            got=f"{stages}, num_hidden_layers={text.num_hidden_layers}",
            expected=f"at most {text.num_hidden_layers}",
            remedy="use fewer stages; FSDP shards over all other ranks",
        )


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The pipeline of this rank, with collectives between its stages.

    Attributes:
        stage: this rank's stage.
        size: the number of stages.
        group: the process group with one rank of each stage, in the order of the stages. These ranks process
            the same rows.
        ends: the process group of the first and the last rank; None on the other ranks.
        meter: the meter for exchanged bytes.
    """

    stage: int
    size: int
    group: dist.ProcessGroup
    ends: dist.ProcessGroup | None
    meter: CollectiveMeter

    @classmethod
    def of(cls, ranks: DeviceMesh, meter: CollectiveMeter) -> Pipeline:
        """Create this rank's pipeline. All ranks must call this together.

        Args:
            ranks: the mesh of all pipelines. The first dimension is the stages.
            meter: the meter for exchanged bytes.
        """
        rank, timeout = dist.get_rank(), collective_timeout()
        found: Any = None
        for column in ranks.mesh.flatten(1).T.tolist():
            group = dist.new_group(column, timeout=timeout)
            ends = dist.new_group([column[0], column[-1]], timeout=timeout)
            if rank in column:
                at_end = rank in (column[0], column[-1])
                found = cls(column.index(rank), len(column), group, ends if at_end else None, meter)
        assert isinstance(found, cls)
        return found

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == self.size - 1

    def broadcast(self, tensor: Tensor, stage: int) -> Tensor:
        """Broadcast a contiguous tensor in place, from one stage to the other stages of this pipeline.

        All ranks of the pipeline must call this together.
        """
        with self.meter.measure(tensor.device, 0 if self.stage == stage else tensor.nbytes):
            dist.broadcast(tensor, group=self.group, group_src=stage)
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast a picklable object from the last stage, and return it.

        All ranks of the pipeline must call this together.
        """
        held, last = [value], self.size - 1
        dist.broadcast_object_list(held, group=self.group, group_src=last, device=torch.device("cpu"))
        return held[0]

    def stage_of(self, layer: int, layers: int) -> int:
        """Return the stage of the layer with index `layer`, for a model with `layers` layers.

        The numbers of layers of the stages differ by at most one. The last stage, which also has the head,
        never has more layers than another stage.
        """
        return next(stage for stage in range(self.size) if layer * self.size < layers * (stage + 1))

    def cut(self, module: PackedModel) -> tuple[dict[str, torch.Size], dict[str, int], bool]:
        """Remove all modules of other stages from a whole model, in place.

        Call this before the model is sharded. Layers keep their indices and names.

        Returns:
            A dict from Hugging Face name to the shape of each weight of the whole model, with tied weights
            once. A dict from name to the stage of each weight. Whether embedding and output head are tied, so
            that both the first and the last stage have the matrix.
        """
        decoder: Any = module.decoder
        head = module.output_layer
        named = {module.hf_name(name): value for name, value in stored_tensors(module).items()}
        stages: dict[Tensor, int] = dict.fromkeys(decoder.embed_tokens.parameters(), 0)
        layers = module.layers
        for index, layer in enumerate(layers):
            stage = self.stage_of(index, len(layers))
            stages |= dict.fromkeys(stored_tensors(layer).values(), stage)
            if stage != self.stage:
                layers[index] = OtherStageLayer()
        tied = head.weight is decoder.embed_tokens.weight
        if self.stage > 0 and not (tied and self.last):
            _empty(decoder.embed_tokens)
        if not self.last:
            decoder.norm = nn.Identity()
            _empty(head)
            module.forward = partial(_hidden_outputs, module)
        shapes = {name: value.shape for name, value in named.items()}
        return shapes, {name: stages.get(value, self.size - 1) for name, value in named.items()}, tied


class OtherStageLayer(nn.Module):
    """A placeholder for a layer of another stage. It returns its input unchanged."""

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        return hidden_states


def own_layers(module: PackedModel) -> list[nn.Module]:
    """Return the decoder layers of this rank's stage; all layers if there is one stage."""
    return [layer for layer in module.layers if not isinstance(layer, OtherStageLayer)]


def present(units: Sequence[Sequence[nn.Module]], module: PackedModel) -> list[list[nn.Module]]:
    """Return the FSDP units of the whole model that belong to this rank's stage."""
    left = {part for part in module.modules() if any(True for _ in part.parameters())}
    here = [[part for part in unit if part in left] for unit in units]
    return [unit for unit in here if unit]


def _empty(module: nn.Module) -> None:
    """Remove the weights of a module that belongs to another stage."""
    for name, _ in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, None)


def _hidden_outputs(module: PackedModel, inputs: PackedInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
    """Run the forward pass of a stage other than the last, and return its hidden states."""
    return {HIDDEN: hidden_states(module.decoder, inputs)}
