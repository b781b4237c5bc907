"""Published speeds of devices, and the time that a step needs for links.

The speeds are used for devices that `tandem bench` has not measured. Links connect devices with each other
and with the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.root import TrainConfig
from tandem.memory.seconds import Rates, Work
from tandem.memory.shapes import ModelShape
from tandem.memory.training import reduces_each

EFFICIENCY = (3.0, 1.3, 0.0, 0.0, 0.0)
"""The default factors of a phase on a device whose type the user named (see `seconds.Factors`).

Operations reach a third of the peak speed: torchtitan publishes 33% for Llama 3 8B with FSDP2 on 8 H100.
Memory traffic reaches three quarters of the peak speed, which is an assumption.
"""
PER_NODE = 8
_LATENCY = 10e-6
"""The seconds of an all-reduce of a single decode step; an assumption."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """A type of device, as described in the vendor's data sheet.

    Attributes:
        size: memory in GB.
        rates: operations per second in bf16 without sparsity, and bytes per second of its memory.
        host: bytes per second and direction to the host.
        near: bytes per second and direction to another device of the node.
        far: bytes per second and direction to a device of another node.
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
"""A dict from name to type of device.

The links between nodes are the links in the vendor's servers: HDR for A100, NDR for H100 and H200. For A10,
100 Gb/s is an assumption. These speeds were not measured here.
"""


def nearest_class(gigabytes: float) -> str:
    """Return the name of the device type with the nearest memory size, the fastest if several are equal."""
    return min(
        CLASSES,
        key=lambda name: (abs(CLASSES[name].size - gigabytes), -CLASSES[name].rates.operations),
    )


def link_seconds(
    config: TrainConfig, shape: ModelShape, work: Mapping[str, Work], kind: DeviceClass
) -> float:
    """Return the seconds of communication of one device in a step, without overlap with computation.

    The result includes gathering weights and reducing gradients; the sums and exchanges of split layers;
    copies from and to the host; and the time that pipeline stages wait for the first micro-batch.

    Args:
        config: the config.
        shape: the shape of all models.
        work: the work of the step's phases.
        kind: the type of device.
    """
    reference = config.needs_reference and not config.reference_is_the_actor
    there = {"actor": True, "ref": reference, "critic": config.needs_critic}
    found = sum(_role_seconds(config, role, shape, work, kind) for role in there if there[role])
    rollout, d = config.actor_rollout_ref.rollout, shape.decoder
    if rollout.split > 1:
        written = work["generate_sequences"]
        sums = 2 * (rollout.split - 1) * 2 * 2 * d.layers * d.hidden * written.tokens
        found += sums / _link(kind, rollout.split) + 2 * written.calls * _LATENCY
    return found


_FORWARDS = {"actor": "old_log_prob", "ref": "ref", "critic": "values"}


def _role_seconds(
    config: TrainConfig, role: str, shape: ModelShape, work: Mapping[str, Work], kind: DeviceClass
) -> float:
    """Return the seconds of communication in all passes over one model."""
    section: Any = config.critic if role == "critic" else getattr(config.actor_rollout_ref, role)
    model = config.critic.model if role == "critic" else config.actor_rollout_ref.model
    forward, update = work.get(_FORWARDS[role], Work()), work.get(f"update_{role}")
    fsdp, layers, devices = section.fsdp_config, shape.decoder.layers, config.trainer.devices_of(role)
    tensor, stages = fsdp.tensor_parallel_size, fsdp.pipeline_parallel_size
    parts = devices // (tensor * stages)
    shards = parts if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    apart = fsdp.expert_parallel_size
    experts = shape.experts / apart / stages * (apart > 1)
    own = (shape.streamed(apart) / stages - experts) / tensor + experts
    gathered = 2 * own * forward.calls * stages / layers
    held = (own + (apart - 1) * experts) / shards
    moved = 2 * 4 * held * (bool(fsdp.param_offload) * (3 if update else 1))
    reduced, waiting, tokens = 0.0, 0.0, forward.tokens
    if update is not None:
        batch, mini = config.data.train_batch_size, section.ppo_mini_batch_size
        updates = section.ppo_epochs * -(-batch // mini)
        passes = update.calls * stages / layers  # the forward pass and the backward pass of each micro-batch
        gathered += 2 * own * 2 * passes / 3
        each = reduces_each(fsdp.gradient_sync, (2 + 4) * own, shards, kind.size * 2**30)
        reduced = 4 * own * (passes / 3 if each else updates)
        moved += 2 * 8 * held * bool(fsdp.optimizer_offload)
        moved += 4 * update.tokens * tensor * shape.decoder.hidden * layers * model.enable_activation_offload
        turns = max(1.0, passes / updates / 3)
        waiting = update.floor(kind.rates) * (stages - 1) / turns
        tokens += 3 * update.tokens
    alike = shards // apart  # the ranks with the same experts
    sent = (own - experts) * (shards - 1) / shards + experts * (alike - 1) / alike
    seconds = (gathered + reduced) * sent / own / _link(kind, shards * tensor)
    copies = parts // shards
    seconds += 2 * reduced / shards * (copies - 1) / copies / _link(kind, devices)
    within = _within(section, shape, tokens * (tensor * layers), kind)
    return float(seconds + within + moved / kind.host + waiting)


def _within(section: Any, shape: ModelShape, tokens: float, kind: DeviceClass) -> float:
    """Return the seconds of communication inside split layers.

    Tensor parallelism needs two all-reduces of hidden states per pass. Sequence parallelism exchanges
    queries, keys, values and outputs. Expert parallelism sends the hidden state of each pair of token and
    expert to the expert and back.

    Args:
        section: the config section of the model.
        shape: the shape of the model.
        tokens: number of tokens times number of layers.
        kind: the type of device.
    """
    tensor, sequence = section.fsdp_config.tensor_parallel_size, section.ulysses_sequence_parallel_size
    d = shape.decoder
    summed = 2 * 2 * 2 * d.hidden * tokens * (tensor - 1) / tensor
    width = (d.heads + d.key_heads) * d.widths / tensor
    exchanged = 2 * width * tokens * (sequence - 1) / sequence
    apart = section.fsdp_config.expert_parallel_size
    pairs = d.experts.routed * (1 - d.plain / d.layers) * tokens / tensor
    sent = 2 * 2 * d.hidden * pairs * (apart - 1) / apart
    found = summed / _link(kind, tensor) + exchanged / _link(kind, sequence * tensor)
    return float(found + sent / _link(kind, apart * tensor))


def _link(kind: DeviceClass, devices: int) -> float:
    return kind.near if devices <= PER_NODE else kind.far
