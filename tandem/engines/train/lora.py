"""The adapters of an engine's model: weights merged shard by shard, and checkpoints that hold what is trained
and the digest of the rest."""

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
"""Keys of a checkpoint: checksums of the frozen weights in `BASE_TYPE`, by name; lora_alpha / lora_rank."""
BASE_TYPE = torch.bfloat16  # the coarsest in which an engine may hold them
_SHOWN = 3


class Adapters:
    """The adapters of a sharded model; of one without, nothing changes.

    Args:
        module: sharded, with every parameter in its final place.
        meter: counts collectives.
        grid: the ranks that hold parts of one copy.
    """

    def __init__(self, module: nn.Module, meter: CollectiveMeter, grid: Grid) -> None:
        self._layers = {layer.base_layer.weight: layer for layer in adapted_layers(module).values()}
        self._meter = meter
        self._grid = grid
        self._base: dict[str, Tensor] | None = None

    def __bool__(self) -> bool:
        return bool(self._layers)

    def merged(self, weight: Tensor) -> Tensor:
        """Computes the weight with its adapter, W + s B A, in the adapter's type and the weight's place: each
        rank adds to its part what belongs there. A weight without an adapter is given back as it is.
        Collective: the two factors are gathered, the weight is not."""
        layer = self._layers.get(weight)
        if layer is None:
            return weight.detach()
        a, b = (gathered(factor.detach(), factor.dtype, self._meter) for factor in factors(layer))
        rows, columns = place(weight)
        part = merged(local(weight.detach()).to(a.dtype), a[:, columns], b[rows], scaling_of(layer))
        assert isinstance(weight, DTensor), "no shard: the model is unsharded"
        return joined(part, weight._spec)

    def check_whole(self) -> None:
        """
        Raises:
            EngineError: the weights are not those that the model computes with.
        """
        if self:
            raise EngineError(
                "beside its weights the module has adapters, and cannot be shared as one without",
                field="model.lora_rank",
                expected="0, or a receiver that takes a stream of weights",
            )

    def state(self, named: dict[str, Tensor]) -> dict[str, Any]:
        """The entries of a checkpoint besides the parameters that are trained. Collective when first asked.

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
        """Refuses what was saved beside another base or with other adapters, before anything is read into
        this model. Collective.

        Args:
            path: of a checkpoint.
            state: what would be saved now.

        Raises:
            CheckpointError: names what differs.
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
                whose = "of other adapters or of another model" if have else "of a model without adapters"
                raise CheckpointError(
                    f"the checkpoint is {whose}",
                    field="model.target_modules" if have else "model.lora_rank",
                    got=f"{path}: lacks {len(lacks)} tensors, has {len(more)} others and {len(shaped)} of "
                    f"another shape, such as {first} {have.get(first, '')}".rstrip(),
                    expected=f"{len(want)} tensors, such as {first} {want.get(first, '')}".rstrip(),
                    remedy="resume with the lora_rank, target_modules and model.path of the run that saved "
                    "it",
                )
        base, scaling = {name: value.clone() for name, value in state[BASE].items()}, state[SCALING].clone()
        load_shards({BASE: base, SCALING: scaling}, reader)
        changed = [name for name, value in state[BASE].items() if not torch.equal(base[name], value)]
        if changed:
            raise CheckpointError(
                "the adapters were trained beside the weights of another model",
                field=changed[0],
                got=f"{path}: {len(changed)} of {len(base)} frozen weights differ, "
                + ", ".join(changed[:_SHOWN]),
                expected="the weights that model.path had when the run began",
                remedy="set model.path to that folder",
            )
        if scaling != state[SCALING]:
            raise CheckpointError(
                "the adapters were trained with another scale",
                field="model.lora_alpha",
                got=f"{path}: lora_alpha / lora_rank = {float(scaling):g}",
                expected=f"{float(state[SCALING]):g}",
                remedy="resume with the lora_alpha of the run that saved it",
            )


def trained(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a model with adapters that are trained."""
    return {name: p for name, p in named.items() if p.requires_grad or is_adapter(name)}
