"""The choice of which activations are recomputed in the backward pass, based on free memory.

The choice is made at the first update. At this time, all other memory of the models is already allocated on
the device. So the free memory can be measured. What layers keep is measured too, in a forward pass of a
micro-batch. The choice is made again if a micro-batch has more tokens than the choice was made for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tandem.device import memory_use
from tandem.engines.train.base import MicroBatching
from tandem.engines.train.division import Division
from tandem.engines.train.microbatch import MicroBatch, most_of_ranks
from tandem.engines.train.module import Settings
from tandem.errors import DeviceMemoryError
from tandem.memory.activations import FASTEST_FIRST, Decoder, LayerBytes, Recomputed, Setup, fastest_that_fits
from tandem.memory.gathered import Gathered
from tandem.memory.host import host_free, host_total
from tandem.memory.shapes import model_shape
from tandem.memory.training import CPU_TILE, TILE, Way, reduces_each, update_moments, worst
from tandem.models.activations import Switch
from tandem.models.architectures import field_of
from tandem.models.expert_parallel import experts_modules
from tandem.models.pipeline import own_layers
from tandem.models.policy import PackedModel
from tandem.models.tensor_group import local

_FIELD = "gradient_checkpointing_mode"
# The fraction of free memory that stays unused: on a GPU because of fragmentation, on a host for other
# programs.
_RESERVED = {"cuda": 0.1, "cpu": 0.5}
# Without a token budget, the choice is made for this many times the tokens of the largest micro-batch.
_GROWTH = 1.25


class Recomputation:
    """The choice of which activations a model's layers recompute, the same on all ranks.

    Args:
        switch: the switch that sets which activations are recomputed. None: the config determines this.
        module: the sharded model.
        units: the FSDP units, with the root last.
        division: the parallel groups of this rank.
        settings: the engine's config sections and device.
        say: a function that receives messages for the user. None: there are no messages.

    Attributes:
        reduces_each: whether gradients are reduced in each micro-batch; see `fsdp_config.gradient_sync`.
    """

    def __init__(
        self,
        switch: Switch | None,
        module: PackedModel,
        units: Sequence[FSDPModule],
        division: Division,
        settings: Settings,
        say: Callable[[str], None] | None,
    ) -> None:
        self._switch, self._module, self._units = switch, module, units
        self._settings, self._model, self._device = settings, settings.model, settings.device
        self._compiled = settings.fsdp.use_torch_compile
        self._division, self._say = division, say
        self._shards = division.grid.weights["shard"].size()
        own = self._gathered()
        whole = settings.compute.itemsize * own.whole + settings.master.itemsize * own.trained
        asked, total = settings.fsdp.gradient_sync, _total_bytes(self._device)
        self.reduces_each = bool(most_of_ranks(reduces_each(asked, whole, self._shards, total)))
        self._tokens = 0  # the number of tokens for which the choice was made
        self._layer: LayerBytes | None = None
        self._sentence = ""

    def fit(
        self, parts: Sequence[MicroBatch], micro: MicroBatching, run: Callable[[MicroBatch], object]
    ) -> None:
        """Choose which activations to recompute, unless an earlier choice covers these micro-batches.

        Call this before the micro-batches run. Collective if a choice is made.

        Args:
            parts: the micro-batches.
            micro: the rule that made the micro-batches. On a GPU, micro-batches with the whole token budget
                must fit into memory.
            run: a function that runs a micro-batch without gradients.
        """
        if self._switch is None:
            return
        budget = None if self._device.type == "cpu" else micro.max_tokens  # a CPU splits further
        tokens = most_of_ranks(max(budget or 0, *(len(part.inputs.input_ids) for part in parts)))
        if tokens <= self._tokens:
            return
        self._tokens = int(tokens * _GROWTH) if budget is None else tokens
        if self._model.enable_activation_offload:
            reason = "activations are offloaded to the host, and this way there is least to copy"
            self._tell(f"recomputation: full, because {reason}")
            return
        largest = max(parts, key=lambda part: len(part.inputs.input_ids))
        found = self._switch.measured(lambda: run(largest), compiled=self._compiled)
        self._layer = LayerBytes(*(size / len(largest.inputs.input_ids) for size in found))
        self._choose(parts, micro)

    @contextmanager
    def out_of_memory(self) -> Iterator[None]:
        """Convert an out-of-memory error of the GPU to an error that names the config keys to change.

        Raises:
            DeviceMemoryError: the GPU ran out of memory inside this context.
        """
        try:
            yield
        except RuntimeError as raised:
            # A pipeline schedule wraps the error that a stage raised.
            error = raised if isinstance(raised, torch.OutOfMemoryError) else raised.__cause__
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            full = "enable_activation_offload=true, or use fewer tokens per micro-batch and device"
            raise DeviceMemoryError(
                "the GPU has too little memory for the update",
                use=memory_use(self._device),
                field=_FIELD,
                got="; ".join(filter(None, (str(error).partition("\n")[0], self._sentence))),
                remedy=f"set {full}" if self._whole else f"set {_FIELD}=full, then {full}",
            ) from error

    @property
    def _whole(self) -> bool:
        """Return whether all layers recompute all of their activations."""
        if self._switch is not None:
            return self._switch.mode == "full"
        return self._model.enable_gradient_checkpointing and self._model.gradient_checkpointing_mode == "full"

    def _choose(self, parts: Sequence[MicroBatch], micro: MicroBatching) -> None:
        assert self._switch is not None
        needed = self._needed(parts, micro)
        free = _free_bytes(self._device)
        room = int(free * (1 - _RESERVED[self._device.type]))
        mine = fastest_that_fits(needed, room)
        mode = FASTEST_FIRST[most_of_ranks(FASTEST_FIRST.index(mine))]
        self._switch.mode = mode
        rest = ["another rank has less memory"] if mode != mine else []
        rest += ["this may not be enough memory"] if needed[mode] > room else []
        faster = [f"{m} would need {_size(needed[m])}" for m in needed if needed[m] > needed[mode]]
        self._tell(
            f"recomputation: {mode}: an update needs {_size(needed[mode])} of {_size(max(0, room))} free"
            + "".join(f"; {part}" for part in (*faster, *rest))
            + f" (for {self._tokens:,} tokens; "
            f"{_RESERVED[self._device.type]:.0%} of {_size(free)} stay in reserve)"
        )

    def _needed(self, parts: Sequence[MicroBatch], micro: MicroBatching) -> dict[Recomputed, int]:
        """Return for each mode the maximum bytes of an update, without weights and optimizer state.

        With a token budget, the number of micro-batches changes from step to step. The result is then for the
        most expensive case.
        """
        several = len(parts) > 1 or micro.max_tokens is not None
        policy = self._module.kind == "policy"
        way = Way(
            self._setup(parts),
            self._settings.master.itemsize,
            self._shards,
            reshard=self._settings.fsdp.reshard_after_forward,
            head=(self._module.kernels.head or "torch") if policy else "value",
            micro_batches=3 if several else 1,
            each=self.reduces_each,
            entropy=policy,
            tile=CPU_TILE if self._device.type == "cpu" else TILE,
        )
        own, decoder = self._gathered(), _decoder(self._module)
        return {
            mode: round(worst(update_moments(own, decoder, replace(way, mode=mode), self._tokens)).total)
            for mode in FASTEST_FIRST
            if mode != "ops" or not self._compiled  # with compiled layers, "ops" cannot keep matrix products
        }

    def _tell(self, sentence: str) -> None:
        """Send the user a message about the choice, unless the previous message was about the same choice."""
        if self._say is not None and sentence.split(":")[:2] != self._sentence.split(":")[:2]:
            self._say(sentence)
        self._sentence = sentence

    def _setup(self, parts: Sequence[MicroBatch]) -> Setup:
        work, pipeline = self._division.grid.work, self._division.pipeline
        held = 1 if pipeline is None else len(parts)
        if pipeline is not None and self._settings.fsdp.pipeline_schedule == "1f1b":
            held = min(held, pipeline.size - pipeline.stage)
        return Setup(
            itemsize=self._settings.compute.itemsize,
            tensor=work["tp"].size(),
            experts=self._settings.fsdp.expert_parallel_size,
            sequence=work["sequence"].size(),
            lora_rank=self._model.lora_rank,
            fused=self._module.kernels.fused,
            held=held,
            measured=self._layer,
        )

    def _gathered(self) -> Gathered:
        """Return the sizes of this rank's layers and root unit when all FSDP shards are gathered."""
        layers = own_layers(self._module)
        inside, learns = (sum(_numbers(layer, trained=only) for layer in layers) for only in (False, True))
        whole, trained = (_numbers(self._module, trained=only) for only in (False, True))
        head = self._module.output_layer if self._module.kind == "policy" else None
        group = self._division.experts
        divided = [0 if group is None else sum(map(_numbers, experts_modules(layer))) for layer in layers]
        return Gathered(
            layers=len(layers),
            layer=inside / len(layers),
            root=whole - inside,
            head=0 if head is None else _numbers(head),
            trained_layer=learns / len(layers),
            trained_root=trained - learns,
            largest=max(map(_numbers, layers)),
            unit=max(_numbers(layer) - inner for layer, inner in zip(layers, divided, strict=True)),
            experts=max(divided),
            elsewhere=0 if group is None else (group.size - 1) * sum(divided) / len(layers),
            stay=0 if group is None or group.shards > 1 else sum(divided),
        )


def _decoder(module: PackedModel) -> Decoder:
    """Return the sizes of a decoder, for the tensors that a layer needs only while it runs.

    Not every config has the same names. If it does not name the width of the MLP, this is 4 D.
    """
    config = module.decoder.config
    hidden, inner = config.hidden_size, field_of(config, "intermediate_size")
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner if isinstance(inner, int) else 4 * hidden,
        "num_attention_heads": field_of(config, "num_attention_heads") or 1,
        "num_hidden_layers": field_of(config, "num_hidden_layers") or 1,
        "vocab_size": config.vocab_size,
    }
    decoder, layers = model_shape({**config.to_dict(), **sizes}).decoder, len(own_layers(module))
    return replace(decoder, layers=layers, plain=min(decoder.plain, layers))


def _numbers(module: nn.Module | FSDPModule, *, trained: bool = False) -> int:
    """Count the elements that this rank has when FSDP has gathered its shards, if they have equal sizes."""
    whole: Any = module
    return sum(_gathered(p) for p in whole.parameters() if p.requires_grad or not trained)


def _gathered(parameter: Any) -> int:
    mesh = parameter.device_mesh
    shards: int = mesh.size(mesh.mesh_dim_names.index("shard"))
    return local(parameter).numel() * shards


def _free_bytes(device: torch.device) -> int:
    """Return the free bytes of this rank's device. On a CPU, divide the free host memory by the ranks."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that the allocator caches is free after it is released
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return host_free() // _ranks_here()


def _total_bytes(device: torch.device) -> int:
    """Return the total bytes of this rank's device. On a CPU, divide the host memory by the ranks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_total() // _ranks_here()


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
