"""The adapters of an engine's model.

Adapters are merged into their base weights shard by shard. Checkpoints hold the trained parameters and
checksums of the frozen ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from tandem.checkpoint.sharded import ShardReader, load_shards
from tandem.engines.train.shards import gathered, part_checksum
from tandem.errors import CheckpointError, EngineError
from tandem.models.collectives import CollectiveMeter
from tandem.models.lora import adapted_layers, factors, is_adapter, merged, scaling_of
from tandem.models.parallel import Grid
from tandem.models.tensor_group import joined, local, place

BASE, SCALING = "base", "lora_scaling"
"""Keys of a checkpoint.

BASE: checksums of the frozen weights in `BASE_TYPE`, by name. SCALING: lora_alpha / lora_rank.
"""
BASE_TYPE = torch.bfloat16  # the least precise type in which an engine may hold the frozen weights
_SHOWN = 3


class Adapters:
    """The adapters of a sharded model. For a model without adapters, this changes nothing.

    Args:
        module: the sharded module, with every parameter in its final place.
        meter: counts collectives.
        grid: the ranks that hold parts of one copy of the model.
    """

    def __init__(self, module: nn.Module, meter: CollectiveMeter, grid: Grid) -> None:
        self._layers = {layer.base_layer.weight: layer for layer in adapted_layers(module).values()}
        self._meter = meter
        self._grid = grid
        self._base: dict[str, Tensor] | None = None

    def __bool__(self) -> bool:
        return bool(self._layers)

    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight merged with its adapter: W + s B A.

        The result has the adapter's type and is sharded like the weight. Each rank adds to its shard the part
        of B A that belongs there. A weight without an adapter is returned unchanged. Collective: the two
        factors are gathered, the weight is not.
        """
        layer = self._layers.get(weight)
        if layer is None:
            return weight.detach()
        a, b = (gathered(factor.detach(), factor.dtype, self._meter) for factor in factors(layer))
        rows, columns = place(weight)
        part = merged(local(weight.detach()).to(a.dtype), a[:, columns], b[rows], scaling_of(layer))
        assert isinstance(weight, DTensor), "the weight is not sharded: the model is unsharded now"
        return joined(part, weight._spec)

    def check_whole(self) -> None:
        """Check that the model has no adapters, so that the module's weights are all it computes with.

        Raises:
            EngineError: the model has adapters.
        """
        if self:
            raise EngineError(
                "the engine cannot give out its module: the module has adapters besides its weights",
                field="model.lora_rank",
                expected="0, or a rollout engine that receives a stream of weights",
            )

    def state(self, named: dict[str, Tensor]) -> dict[str, Any]:
        """Return the entries of a checkpoint besides the trained parameters. Collective on the first call.

        Args:
            named: all parameters by name.
        """
        if self._base is None:
            learns = trained(named)
            frozen = {name: p.detach() for name, p in named.items() if name not in learns}
            total = torch.stack([part_checksum(p, BASE_TYPE) for p in frozen.values()])
            for axis in ("shard", "tp"):
                self._meter.all_reduce(total, group=self._grid.weights[axis].get_group())
            self._base = dict(zip(frozen, total.cpu().unbind(), strict=True))
        scaling = scaling_of(next(iter(self._layers.values())))
        return {BASE: dict(self._base), SCALING: torch.tensor(scaling, dtype=torch.float64)}

    def check_saved(self, path: Path, state: dict[str, Any]) -> None:
        """Check that a checkpoint has the same base model and adapters, before anything is loaded.

        Collective.

        Args:
            path: folder of the checkpoint.
            state: what would be saved now.

        Raises:
            CheckpointError: something differs; the message names it.
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
                    remedy="resume with the lora_rank, target_modules and model.path of the run that saved "
                    "the checkpoint",
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
    """Return the trained parameters of a model with adapters."""
    return {name: p for name, p in named.items() if p.requires_grad or is_adapter(name)}
