"""Published rates of kinds of devices, for those that `tandem bench` has not measured, and the least time
that links take in a step: between the devices, and to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.root import TrainConfig
from tandem.memory.seconds import Rates, Shape, Work
from tandem.memory.training import reduces_each

EFFICIENCY = (3.0, 1.3, 0.0, 0.0, 0.0)
"""Default factors of a phase on a device that is named: a third of the peak's operations, as torchtitan
publishes for Llama 3 8B under FSDP2 on 8 H100, 33%; three quarters of the bytes, assumed."""
PER_NODE = 8
_LATENCY = 10e-6
"""Seconds of a sum over devices while tokens are written one by one; assumed."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """A kind of device, by its vendor's data sheet.

    Attributes:
        size: of its memory, GB.
        rates: bf16 without sparsity, and of its memory.
        host, near, far: bytes per second and direction to the host, to another device of the node, and to
            one of another node.
        source: the data sheet.
    """

    size: float
    rates: Rates
    host: float
    near: float
    far: float
    source: str


CLASSES = {
    "A10": DeviceClass(24, Rates(125e12, 600e9), 32e9, 32e9, 12.5e9, "NVIDIA A10 data sheet"),
    "A100-40": DeviceClass(40, Rates(312e12, 1.555e12), 32e9, 300e9, 25e9, "NVIDIA A100 data sheet"),
    "A100": DeviceClass(80, Rates(312e12, 2.039e12), 32e9, 300e9, 25e9, "NVIDIA A100 data sheet"),
    "H100": DeviceClass(80, Rates(989.4e12, 3.35e12), 64e9, 450e9, 50e9, "NVIDIA H100 data sheet"),
    "H200": DeviceClass(141, Rates(989.4e12, 4.8e12), 64e9, 450e9, 50e9, "NVIDIA H200 data sheet"),
}
"""By name. The links between nodes are those of the vendor's own servers: HDR for A100, NDR for H100 and
H200; 100 Gb/s is assumed for A10. None of these rates was measured here."""


def nearest_class(gigabytes: float) -> str:
    """The name of the kind whose memory is nearest in size; of several the fastest."""
    return min(
        CLASSES,
        key=lambda name: (abs(CLASSES[name].size - gigabytes), -CLASSES[name].rates.operations),
    )


def link_seconds(config: TrainConfig, shape: Shape, work: Mapping[str, Work], kind: DeviceClass) -> float:
    """The seconds that the links of a device take in a step, were nothing done meanwhile: weights gathered
    and gradients reduced, sums and exchanges of layers that are split, what lies on the host, and the stages'
    waiting for the first micro-batch.

    Args:
        work: of the step's phases.
        kind: whose links these are.
    """
    found = sum(role.seconds(config, shape, kind) for role in _roles(config, work))
    rollout, d = config.actor_rollout_ref.rollout, shape.decoder
    if rollout.split > 1:
        written = work["generate_sequences"]
        sums = 2 * (rollout.split - 1) * 2 * 2 * d.layers * d.hidden * written.tokens
        found += sums / _link(kind, rollout.split) + 2 * written.calls * _LATENCY
    return found


@dataclass(frozen=True, slots=True)
class _Role:
    """A model of the run, and the phases of its passes."""

    section: Any
    devices: int
    offloads: bool  # activations
    forwards: tuple[Work, ...]
    update: Work | None

    def seconds(self, config: TrainConfig, shape: Shape, kind: DeviceClass) -> float:
        fsdp, layers = self.section.fsdp_config, shape.decoder.layers
        tensor, stages = fsdp.tensor_parallel_size, fsdp.pipeline_parallel_size
        parts = self.devices // (tensor * stages)
        own = (shape.layers + shape.head) / (tensor * stages)
        shards = parts if fsdp.fsdp_size == -1 else fsdp.fsdp_size
        gathered = sum(2 * own * each.calls * stages / layers for each in self.forwards)
        moved = 2 * 4 * own / shards * (bool(fsdp.param_offload) * (3 if self.update else 1))
        reduced, waiting = 0.0, 0.0
        if self.update is not None:
            batch, mini = config.data.train_batch_size, self.section.ppo_mini_batch_size
            updates = self.section.ppo_epochs * -(-batch // mini)
            passes = self.update.calls * stages / layers  # forward and backward, of each micro-batch
            gathered += 2 * own * 2 * passes / 3
            each = reduces_each(fsdp.gradient_sync, (2 + 4) * own, shards, kind.size * 2**30)
            reduced = 4 * own * (passes / 3 if each else updates)
            moved += 2 * 8 * own / shards * bool(fsdp.optimizer_offload)
            moved += 4 * self.update.tokens * tensor * shape.decoder.hidden * layers * self.offloads
            turns = max(1.0, passes / updates / 3)
            waiting = self.update.floor(kind.rates) * (stages - 1) / turns
        seconds = (gathered + reduced) * (shards - 1) / shards / _link(kind, shards * tensor)
        copies = parts // shards
        seconds += 2 * reduced / shards * (copies - 1) / copies / _link(kind, self.devices)
        return float(seconds + self._within(shape, kind) + moved / kind.host + waiting)

    def _within(self, shape: Shape, kind: DeviceClass) -> float:
        """Of layers that are split: two sums of states a pass, or queries, keys, values and outputs
        exchanged."""
        tensor, d = self.section.fsdp_config.tensor_parallel_size, shape.decoder
        sequence = self.section.ulysses_sequence_parallel_size
        tokens = sum(each.tokens for each in self.forwards) + (3 * self.update.tokens if self.update else 0)
        tokens *= tensor * d.layers
        summed = 2 * 2 * 2 * d.hidden * tokens * (tensor - 1) / tensor
        width = 2 * (d.heads + d.key_heads) * d.head_width / tensor
        exchanged = 2 * width * tokens * (sequence - 1) / sequence
        return float(summed / _link(kind, tensor) + exchanged / _link(kind, sequence * tensor))


def _roles(config: TrainConfig, work: Mapping[str, Work]) -> Iterator[_Role]:
    policy, devices = config.actor_rollout_ref, config.trainer.devices_of

    def of(*phases: str) -> tuple[Work, ...]:
        return tuple(work[phase] for phase in phases if phase in work)

    offloads = policy.model.enable_activation_offload
    yield _Role(policy.actor, devices("actor"), offloads, of("old_log_prob"), work["update_actor"])
    if config.needs_reference and not config.reference_is_the_actor:
        yield _Role(policy.ref, devices("ref"), False, of("ref"), None)
    if config.needs_critic:
        offloads = config.critic.model.enable_activation_offload
        yield _Role(config.critic, devices("critic"), offloads, of("values"), work["update_critic"])


def _link(kind: DeviceClass, devices: int) -> float:
    return kind.near if devices <= PER_NODE else kind.far
