"""Merging and checkpoints of the LoRA adapters of an engine's model.

Adapters are merged into their base weights shard by shard. A checkpoint contains the trained parameters, and
checksums of the frozen parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from tandem.checkpoint.sharded import ShardReader, load_shards
from tandem.engines.train.shards import copy_checksum, gathered, part_checksum
from tandem.errors import CheckpointError, EngineError
from tandem.models.collectives import CollectiveMeter
from tandem.models.lora import adapted_layers, factors, is_adapter, merged, scaling_of, weight_name
from tandem.models.parallel import Grid
from tandem.models.tensor_group import joined, local, place

BASE, SCALING = "base", "lora_scaling"
"""The keys of a checkpoint of a model with adapters.

BASE is a dict from the name of each frozen weight and persistent buffer to its checksum in the dtype
`BASE_TYPE`. SCALING is lora_alpha / lora_rank.
"""
BASE_TYPE = torch.bfloat16  # the least precise dtype in which an engine may store the frozen weights
_SHOWN = 3


class Adapters:
    """The adapters of a sharded model. For a model without adapters, the methods change nothing.

    Args:
        module: the sharded module. Its parameters must not be replaced later.
        meter: the meter for collectives.
        grid: the device meshes of the engine.
    """

    def __init__(self, module: nn.Module, meter: CollectiveMeter, grid: Grid) -> None:
        layers = adapted_layers(module).values()
        self._layers = {getattr(layer.get_base_layer(), weight_name(layer)): layer for layer in layers}
        self._meter = meter
        self._grid = grid
        self._base: dict[str, Tensor] | None = None

    def __bool__(self) -> bool:
        return bool(self._layers)

    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight merged with its adapter: W + s B A.

        The result has the adapter's dtype and is sharded like the weight. Each rank adds the matching rows
        and columns of B A to its shard. A weight without an adapter is returned unchanged. This method is
        collective: the factors A and B are gathered, but not the weight.
        """
        layer = self._layers.get(weight)
        if layer is None:
            return weight.detach()
        a, b = (gathered(factor.detach(), factor.dtype, self._meter) for factor in factors(layer))
        part = local(weight.detach()).to(a.dtype)
        part = merged(layer, part, a, b, scaling_of(layer), place(weight))
        assert isinstance(weight, DTensor), "the weight is not sharded: the model is unsharded now"
        return joined(part, weight._spec)

    def check_whole(self) -> None:
        """Check that the model has no adapters, so that its outputs depend only on the base weights.

        Raises:
            EngineError: the model has adapters.
        """
        if self:
            raise EngineError(
                "the engine cannot give out its module: the module has adapters besides its weights",
                field="model.lora_rank",
                expected="0, or a rollout engine that receives a stream of weights",
            )

    def state(self, named: dict[str, Tensor], constants: dict[str, Tensor]) -> dict[str, Any]:
        """Return the checkpoint's entries other than trained parameters. Collective on the first call.

        Args:
            named: a dict from name to parameter, with all parameters.
            constants: a dict from name to persistent buffer.
        """
        if self._base is None:
            learns = trained(named)
            frozen = {name: p.detach() for name, p in named.items() if name not in learns}
            sums = [part_checksum(p, BASE_TYPE) for p in frozen.values()]
            sums += [copy_checksum(value, BASE_TYPE, self._grid) for value in constants.values()]
            total = torch.stack(sums)
            for axis in ("shard", "tp"):
                self._meter.all_reduce(total, group=self._grid.weights[axis].get_group())
            self._base = dict(zip(frozen | constants, total.cpu().unbind(), strict=True))
        scaling = scaling_of(next(iter(self._layers.values())))
        return {BASE: dict(self._base), SCALING: torch.tensor(scaling, dtype=torch.float64)}

    def check_saved(self, path: Path, state: dict[str, Any]) -> None:
        """Check that a checkpoint has the same base model and adapters. Call this before loading.

        Collective.

        Args:
            path: folder of the checkpoint.
            state: the current result of `state`.

        Raises:
            CheckpointError: the base model or the adapters differ. The message names the difference.
        """
        reader = ShardReader(path)
        saved = reader.contents.state_dict_metadata
        for section in (BASE, "model"):
            have = {
                key.partition(".")[2]: tuple(entry.size)
                for key, entry in saved.items()
                if key.startswith(f"{section}.") and isinstance(entry, TensorStorageMetadata)
            }
            want = {name: tuple(value.shape) for name, value in state[section].items()}
            if have != want:
                lacks, more = want.keys() - have.keys(), have.keys() - want.keys()
                shaped = {name for name in have.keys() & want.keys() if have[name] != want[name]}
                first = min(lacks | more | shaped)
                whose = "other adapters or another model" if have else "a model without adapters"
                raise CheckpointError(
                    f"the checkpoint belongs to {whose}",
                    field="model.target_modules" if have else "model.lora_rank",
                    got=f"{path}: {len(lacks)} tensors are missing, {len(more)} are not expected and "
                    f"{len(shaped)} have the wrong shape, for example {first} {have.get(first, '')}".rstrip(),
                    expected=f"{len(want)} tensors, for example {first} {want.get(first, '')}".rstrip(),
                    remedy="resume with the lora_rank, target_modules, target_parameters and model.path of "
                    "the run that saved the checkpoint",
                )
        base, scaling = {name: value.clone() for name, value in state[BASE].items()}, state[SCALING].clone()
        load_shards({BASE: base, SCALING: scaling}, reader)
        changed = [name for name, value in state[BASE].items() if not torch.equal(base[name], value)]
        if changed:
            raise CheckpointError(
                "the adapters were trained with the weights of another base model",
                field=changed[0],
                got=f"{path}: {len(changed)} of {len(base)} frozen weights differ, "
                + ", ".join(changed[:_SHOWN]),
                expected="the weights that model.path had when the run started",
                remedy="set model.path to the folder with those weights",
            )
        if scaling != state[SCALING]:
            raise CheckpointError(
                "the adapters were trained with another scaling factor",
                field="model.lora_alpha",
                got=f"{path}: lora_alpha / lora_rank = {float(scaling):g}",
                expected=f"{float(state[SCALING]):g}",
                remedy="resume with the lora_alpha of the run that saved the checkpoint",
            )


def trained(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a dict from name to parameter with only the trained parameters of `named`."""
    return {name: p for name, p in named.items() if p.requires_grad or is_adapter(name)}
