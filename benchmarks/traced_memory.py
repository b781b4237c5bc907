"""Trace the memory of a log-prob pass and an update, op by op, with torch's FSDPMemTracker.

The model is Tandem's own, sharded by Tandem's own code, under fake tensors. It runs as one of many ranks, of
which the others do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train.execution import synchronize
from tandem.engines.train.optimizers import build_optimizers
from tandem.models import attention
from tandem.models.activations import manage_activations
from tandem.models.attention_kernels import torch_varlen
from tandem.models.collectives import CollectiveMeter
from tandem.models.expert_parallel import ExpertGroup
from tandem.models.heads import tiled
from tandem.models.lora import add_adapters, train_adapters_alone
from tandem.models.packing import PackedInputs, Packing, pack
from tandem.models.parallel import Grid, shard
from tandem.models.policy import PolicyModel
from tandem.models.rectangles import Scores
from tandem.models.routing import Mixtures
from tandem.models.sequence_parallel import SequenceSplit
from tandem.models.tensor_group import TensorGroup
from tandem.models.tensor_parallel import parallelize
from tandem.models.value import ValueModel
from tandem.models.wrap import wrapped
from tandem.protocol import Ragged

CPU = torch.device("cpu")
# The tracker's kinds → the plan's kinds.
KINDS = {
    "SHARDED_PARAM": "weights",
    "OPT": "optimizer",
    "UNSHARDED_PARAM": "gathered",
    "ALL_GATHER": "gathered",
    "SHARDED_GRAD": "gradients",
    "UNSHARDED_GRAD": "gradients",
    "REDUCE_SCATTER": "gradients",
}


@dataclass(frozen=True)
class Case:
    """A model, how it is divided and what runs.

    Attributes:
        model: the contents of config.json.
        lengths: tokens of the sequences of each micro-batch, without the last token of each sequence.
        micro: micro-batches of the update.
        each: whether gradients are reduced in each micro-batch.
        shards, tensor, experts, sequence: the number of ranks that share weights, layers, experts and tokens.
        mode: what is recomputed.
        entropy: whether the head returns entropies too.
        kind: "policy" or "value".
        reshard: whether weights are resharded after the forward.
        prefetch: whether the next unit is gathered in advance.
        lora_rank: the rank of adapters on all linear layers, which alone are trained; 0 trains all weights.
    """

    model: dict[str, Any]
    lengths: tuple[int, ...]
    micro: int = 1
    each: bool = False
    shards: int = 1
    tensor: int = 1
    experts: int = 1
    sequence: int = 1
    mode: str = "none"
    entropy: bool = False
    kind: str = "policy"
    reshard: bool = True
    prefetch: bool = False
    lora_rank: int = 0

    @property
    def world(self) -> int:
        return self.shards * self.tensor


class Tracker(FSDPMemTracker):
    """torch's tracker, but gathered weights count as weights from the start of the gathering.

    torch's own tracker counts them as activations until the unit is whole.
    """

    def __init__(self, module: nn.Module, optimizer: Any, units: list[Any]) -> None:
        super().__init__(module, optimizer)
        self._gathers = False
        for unit in units:
            group = unit._get_fsdp_state()._fsdp_param_group
            for name in ("unshard", "wait_for_unshard"):
                setattr(group, name, self._as_weights(getattr(group, name)))

    def _as_weights(self, work: Callable[..., None]) -> Callable[..., None]:
        def gather(*args: Any, **kwargs: Any) -> None:
            self._gathers = True
            try:
                work(*args, **kwargs)
            finally:
                self._gathers = False

        return gather

    def _track(self, reftype: Any, t: torch.Tensor) -> None:
        super()._track(_FSDPRefType.UNSHARDED_PARAM if self._gathers else reftype, t)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Use the attention kernel for variable lengths and a GPU's tile size, on fake tensors.

    The pairs of token and expert are divided evenly over ranks.
    """
    kept = attention.rectangular, tiled.TILE_BYTES["cpu"], DeviceMesh._concatenate
    counts = torch.bincount, FakeTensor.tolist
    pairs = 0

    def count(values: Tensor, *, minlength: int) -> Tensor:
        nonlocal pairs
        pairs = values.numel()
        return values.new_empty(minlength)

    def even(counted: Tensor) -> Any:
        size = counted.shape[-1]
        row = [pairs // size + (place < pairs % size) for place in range(size)]
        return row if counted.ndim == 1 else [row] * len(counted)

    def real(*args: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return kept[2](*args)

    def attend(rows: list[Tensor], packing: Packing, scores: Scores) -> Tensor:
        known = torch_varlen.takes(scores)
        return torch_varlen.attend(rows, packing, scores) if known else kept[0](rows, packing, scores)

    attention.rectangular, tiled.TILE_BYTES["cpu"] = attend, tiled.TILE_BYTES["cuda"]
    DeviceMesh._concatenate = real
    torch.bincount, FakeTensor.tolist = count, even
    try:
        yield
    finally:
        attention.rectangular, tiled.TILE_BYTES["cpu"], DeviceMesh._concatenate = kept
        torch.bincount, FakeTensor.tolist = counts


def traced(case: Case) -> dict[str, dict[str, int]]:
    """Return the peak bytes of "log_prob" and "update", by kind."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world)
    try:
        grid = Grid.over_all_ranks(CPU, sequence=case.sequence, tensor=case.tensor, experts=case.experts)
        meter = CollectiveMeter()
        split = SequenceSplit.of(grid.work["sequence"], meter)
        sequences = Ragged.from_list([torch.zeros(n + 1, dtype=torch.int64) for n in case.lengths])
        inputs = [pack(sequences, None, device=CPU, split=split, whole=False) for _ in range(case.micro)]
        for one in inputs:
            one.packing.chunked(case.model.get("attention_chunk_size") or sum(case.lengths))
        with as_on_a_gpu(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            return _run(case, grid, meter, [_faked(one, fake) for one in inputs])
    finally:
        dist.destroy_process_group()


def _faked(inputs: PackedInputs, fake: FakeTensorMode) -> PackedInputs:
    for packing in (inputs.packing, *inputs.packing.chunks.values()):
        for name in ("position_ids", "cu_seqlens", "places"):
            value = getattr(packing, name)
            if value is not None:
                setattr(packing, name, fake.from_tensor(value))
    names = ("input_ids", "sources", "targets", "places")
    return replace(inputs, **{name: fake.from_tensor(getattr(inputs, name)) for name in names})


def _run(
    case: Case, grid: Grid, meter: CollectiveMeter, inputs: list[PackedInputs]
) -> dict[str, dict[str, int]]:
    module, units = _sharded(case, grid, meter)
    optimizers = build_optimizers(module, module.decoder.layers, OptimConfig(), meter)
    tracker = Tracker(module, optimizers[0], units)
    outputs = {"values"} if case.kind == "value" else {"log_probs", *(["entropy"] if case.entropy else [])}
    wanted = frozenset(outputs)

    def log_prob() -> None:
        with torch.no_grad():
            module(inputs[0], wanted)
        for unit in units:
            unit.reshard()

    def update() -> None:
        for index, part in enumerate(inputs):
            last = index == len(inputs) - 1
            synchronize(units[-1], last=last, each=case.each)
            tracker.reset_mod_stats()
            out = module(part, wanted)
            torch.autograd.backward(sum(value.sum() for value in out.values()))
            del out

    def peak(work: Callable[[], None]) -> dict[str, int]:
        tracker.reset_mod_stats()
        with tracker:
            work()
        found: dict[str, int] = {}
        for kind, size in tracker.get_tracker_snapshot("peak")[CPU].items():
            name = str(kind).rpartition(".")[2]
            key = "total" if name == "Total" else KINDS.get(name, "activations")
            found[key] = found.get(key, 0) + size
        return found

    log_prob()  # exclude one-time setup, and shapes that DTensor tries only once
    if case.tensor > 1:
        peak(update)
        module.zero_grad(set_to_none=True)
    return {"log_prob": peak(log_prob), "update": peak(update)}


def _sharded(case: Case, grid: Grid, meter: CollectiveMeter) -> tuple[Any, list[Any]]:
    """Return the model as `FSDPEngine` builds it on this rank, and its FSDP units."""
    config = AutoConfig.for_model(**case.model)
    model = BackboneConfig.model_construct(**_defaults() | {"lora_rank": case.lora_rank}, path="")
    with unset_fake_temporarily(), torch.device("meta"):
        backbone = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.PACKED, dtype=torch.float32
        )
        if case.lora_rank:
            add_adapters(backbone, model, case.kind, torch.float32)
        backbone.mixtures = Mixtures(backbone)
        module: Any = PolicyModel(backbone) if case.kind == "policy" else ValueModel(backbone)
        module.train()
        if case.lora_rank:
            train_adapters_alone(
                module, None if case.kind == "policy" else module.output_layer, torch.bfloat16
            )
    _allocate(module)
    units = wrapped(module, FSDPConfig().wrap_policy)
    if case.tensor > 1:
        parallelize(module, TensorGroup(grid.weights["tp"], meter))
    experts = None if grid.experts is None else ExpertGroup(grid.experts, meter)
    if experts is not None:
        experts.divide(module)
    switch = manage_activations(module.decoder.layers, model, CPU).switch
    assert switch is not None
    switch.mode = case.mode
    sharded = shard(
        module,
        units,
        grid.fsdp,
        experts=experts,
        compute_dtype=torch.bfloat16,
        master_dtype=torch.float32,
        reshard_after_forward=case.reshard and case.shards > 1,
        forward_prefetch=case.prefetch,
        meter=meter,
    )
    return module, sharded


def _allocate(module: nn.Module) -> None:
    """Give a module without storage fake tensors on the host."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, old in held.items():
                if old is not None and old not in made:
                    new = torch.empty_like(old, device=CPU)
                    made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                held[name] = None if old is None else made[old]  # type: ignore[assignment]


def _defaults() -> dict[str, Any]:
    return {name: f.default for name, f in BackboneConfig.model_fields.items() if name != "path"}
