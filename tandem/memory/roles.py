"""The memory of one model on one rank, between phases and during forward and backward passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tandem.config.batching import Batching
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import PLAIN_DECODERS, BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.memory.activations import FASTEST_FIRST, Recomputed, Setup, fastest_that_fits
from tandem.memory.gathered import Gathered
from tandem.memory.shapes import ModelShape
from tandem.memory.training import (
    CPU_TILE,
    TILE,
    Moment,
    Way,
    forward_moments,
    reduces_each,
    update_moments,
    worst,
)

SIZES = {"fp64": 8, "fp32": 4, "bf16": 2}
CPU_BLOCK = 4096  # on a CPU, micro-batches have at most this many tokens
_STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.0 + 8 / 256, "adamw_cpu": 0.0, "muon": 8.0}
"""Bytes of optimizer state on the device per trained fp32 element; muon's matrices need 4."""


@dataclass(frozen=True, slots=True)
class Load:
    """The samples that a phase processes, over all ranks.

    Attributes:
        samples: number of samples in a mini-batch, or in a forward pass over the whole batch.
        longest: number of tokens of the longest sample.
        batching: the rule that splits a rank's samples into micro-batches.
    """

    samples: int
    longest: int
    batching: Batching


@dataclass(frozen=True, slots=True)
class Held:
    """A model of a role, as placed on one of several ranks.

    Attributes:
        name: the name of the role.
        shape: shape of the model.
        ranks: number of ranks in the role's pool.
        model: the config section of the model.
        fsdp: the config section of the sharding.
        sequence: number of ranks that share the tokens (Ulysses).
        optim: the config section of the optimizer; None if the model is frozen.
        cuda: whether the model is on a CUDA device instead of a CPU.
        head: whether the model has a language model head instead of a value head.
        entropy: whether the updates need entropies.
    """

    name: str
    shape: ModelShape
    ranks: int
    model: BackboneConfig
    fsdp: FSDPConfig
    sequence: int
    optim: OptimConfig | None
    cuda: bool
    head: bool = True
    entropy: bool = False

    @property
    def master(self) -> int:
        return SIZES[self.fsdp.model_dtype]

    @property
    def compute(self) -> int:
        return SIZES.get(self.fsdp.dtype, 2 if self.cuda else self.master)

    @property
    def split(self) -> int:
        """Number of ranks among which tensor and pipeline parallelism divide the layers, before sharding."""
        return self.fsdp.tensor_parallel_size * self.fsdp.pipeline_parallel_size

    @property
    def shards(self) -> int:
        parts = self.ranks // self.split
        return parts if self.fsdp.fsdp_size == -1 else self.fsdp.fsdp_size

    @property
    def data_ranks(self) -> int:
        """Number of ranks that process different samples."""
        return max(1, self.ranks // (self.split * self.sequence))

    @property
    def gathered(self) -> Gathered:
        return Gathered.of(
            self.shape,
            tensor=self.fsdp.tensor_parallel_size,
            experts=self.fsdp.expert_parallel_size,
            stages=self.fsdp.pipeline_parallel_size,
            head=self.head,
            lora_rank=self.model.lora_rank if self.optim else 0,
            expert_rank=self.model.lora_rank if self.optim and self.model.target_parameters else 0,
            trained=self.optim is not None,
            shards=self.shards,
        )

    @property
    def weights(self) -> float:
        """Bytes of this rank's shard of the weights.

        Trained weights have the master dtype. The frozen base weights of adapters have the compute dtype.
        """
        own = self.gathered
        frozen = own.stored - own.learned if self.optim and self.model.lora_rank else 0.0
        return (self.master * (own.stored - frozen) + self.compute * frozen) / self.shards

    @property
    def state(self) -> float:
        """Bytes of the optimizer state on the device."""
        if self.optim is None:
            return 0.0
        own = self.gathered
        on_host = self.optim.optimizer == "adamw_cpu"
        each = _STATE_BYTES["adamw" if on_host and not self.cuda else self.optim.optimizer] * self.master / 4
        saved = own.layers * own.learned_layer * self.master if self.optim.optimizer == "muon" else 0.0
        return (each * own.learned - saved) / self.shards

    @property
    def host_state(self) -> float:
        """Bytes of the optimizer state that is always on the host."""
        if self.optim is None or self.optim.optimizer != "adamw_cpu" or not self.cuda:
            return 0.0
        return 2 * self.master * self.gathered.learned / self.shards

    @property
    def idle(self) -> dict[str, float]:
        """Bytes of "weights" and "optimizer" that stay on the device between phases."""
        stays = {"weights": self.weights, "optimizer": self.state}
        if self.cuda and self.fsdp.param_offload:
            stays["weights"] = 0.0
        if self.cuda and self.fsdp.optimizer_offload:
            stays["optimizer"] = 0.0
        return stays

    @property
    def offloaded(self) -> float:
        """Bytes that are on the host between phases."""
        return self.weights + self.state + self.host_state - sum(self.idle.values())

    def tokens(self, load: Load) -> tuple[int, int]:
        """Return the tokens of this rank's largest micro-batch, and the number of its micro-batches."""
        share = -(-load.samples // self.data_ranks) * load.longest
        most = share
        if load.batching.max_tokens is not None:
            most = min(share, load.batching.max_tokens * self.sequence)
        elif load.batching.max_samples is not None:
            most = min(share, load.batching.max_samples * load.longest)
        if not self.cuda:
            most = min(most, max(CPU_BLOCK, load.longest))
        count = max(-(-share // most), self.fsdp.pipeline_parallel_size)
        return -(-most // self.sequence), count

    def way(self, micro_batches: int = 1) -> Way:
        """Return the settings of a forward or backward pass over this model, without recomputation."""
        fused = self.cuda and self.model.use_liger is not False and self.shape.kind in PLAIN_DECODERS
        stages, held = self.fsdp.pipeline_parallel_size, 1
        if stages > 1:
            held = micro_batches if self.fsdp.pipeline_schedule == "gpipe" else min(stages, micro_batches)
        setup = Setup(
            itemsize=self.compute,
            tensor=self.fsdp.tensor_parallel_size,
            experts=self.fsdp.expert_parallel_size,
            sequence=self.sequence,
            lora_rank=self.model.lora_rank if self.optim else 0,
            fused=fused,
            offloaded=self.cuda and self.model.enable_activation_offload,
            held=held,
        )
        kernels = "triton" if self.cuda and self.model.head in ("auto", "triton", "liger") else "torch"
        return Way(
            setup,
            master=self.master,
            shards=self.shards,
            reshard=self.fsdp.reshard_after_forward,
            prefetch=self.fsdp.forward_prefetch,
            head=kernels if self.head else "value",
            micro_batches=micro_batches,
            entropy=self.entropy,
            tile=TILE if self.cuda else CPU_TILE,
        )

    def forward(self, load: Load, *, entropy: bool = False) -> Moment:
        """Return the moment of peak memory in a forward pass without gradient."""
        tokens, _ = self.tokens(load)
        way = replace(self.way(), entropy=entropy)
        return worst(forward_moments(self.gathered, self.shape.decoder, way, tokens))

    def reduces_each(self, device: float) -> bool:
        """Return whether gradients are reduced in each micro-batch, on a device of `device` bytes."""
        whole = self.compute * self.gathered.whole + self.master * self.gathered.trained
        return reduces_each(self.fsdp.gradient_sync, whole, self.shards, device)

    def update(self, load: Load, free: float, device: float) -> tuple[Moment, str]:
        """Return the moment of peak memory in an update, and the recomputation mode.

        Args:
            load: the samples of the update.
            free: bytes of the device that are free for the update. If the config sets no recomputation mode,
                the mode depends on these bytes.
            device: bytes of the device's whole memory.
        """
        tokens, count = self.tokens(load)
        way, own, decoder = self.way(count), self.gathered, self.shape.decoder
        way = replace(way, each=self.reduces_each(device))

        def needs(mode: Recomputed, share: float = 1.0) -> Moment:
            return worst(update_moments(own, decoder, replace(way, mode=mode, share=share), tokens))

        if not self.model.enable_gradient_checkpointing:
            return needs("none"), "none"
        if self.model.recomputes_by_memory:
            if self.model.enable_activation_offload:
                return needs("full"), "full"
            modes: tuple[Recomputed, ...] = FASTEST_FIRST
            if self.fsdp.use_torch_compile:
                modes = ("none", "full")
            mode = fastest_that_fits({each: round(needs(each).total) for each in modes}, int(free * 0.9))
            return needs(mode), mode
        asked: Any = self.model.gradient_checkpointing_mode
        layers = self.model.gradient_checkpointing_layers or 1
        if asked in ("full", "ops"):
            return needs(asked), asked
        again = layers if asked == "first" else decoder.layers // layers
        return needs("full", min(1.0, again / decoder.layers)), f"{asked} {layers}"
