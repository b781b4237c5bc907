"""The seconds of a run's step on a type of device, from measured or published speeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.root import TrainConfig
from tandem.errors import ConfigError
from tandem.memory.device_file import Device
from tandem.memory.levers import with_value
from tandem.memory.peaks import CLASSES, EFFICIENCY, PER_NODE, DeviceClass, link_seconds, nearest_class
from tandem.memory.plan import Plan, plan
from tandem.memory.seconds import Lengths, Rates, predict, step_work
from tandem.memory.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Stages:
    """The seconds of the three stages of a step.

    Attributes:
        generation: generation of the responses and their rewards.
        training: everything after generation.
        transfer: transfer of the new weights from the training devices to the rollout devices.
    """

    generation: float
    training: float
    transfer: float

    def step(self, *, ahead: bool) -> float:
        """Return the average seconds of a step in a long run.

        Args:
            ahead: whether responses are generated one step ahead. Then the result is the maximum of
                generation and training, plus the transfer. Otherwise it is the sum of all stages.
        """
        both = max(self.generation, self.training) if ahead else self.generation + self.training
        return both + self.transfer


@dataclass(frozen=True, slots=True)
class Clock:
    """The speeds of a device, from which the seconds of a step are predicted.

    Attributes:
        rates: the best speeds of the device; see `tandem.memory.device_file.Device`.
        item: bytes per element; see `tandem.memory.device_file.Device`.
        factors: a dict from phase to its measured factors. None: the minimum `Work.floor` is used, or the
            default factors `EFFICIENCY` if `named`.
        kind: the type of device whose links are included; None: no communication is included.
        named: whether the user named the type of device. Then the default factors are used.
        said: a text for the user about the source of these speeds.
    """

    rates: Rates
    item: int
    factors: Mapping[str, list[float]] | None
    kind: DeviceClass | None
    named: bool
    said: str

    @classmethod
    def of(
        cls, measured: Mapping[str, Device], name: str | None, gigabytes: float, *, cuda: bool
    ) -> Clock | None:
        """Return the clock of a device, or None for a CPU that was not measured.

        Args:
            measured: a dict from name to each device in the device file.
            name: name of a published type of device, if the user named one.
            gigabytes: the device's memory in GB.
            cuda: whether the device is a CUDA device.
        """
        chosen = name or nearest_class(gigabytes)
        words = [chosen.partition("-")[0], f"{gigabytes:g}GB"] if name else [f"{gigabytes:g}GB"]
        words = words if cuda else ["threads"]
        known = [each for each in measured if all(word in each for word in words)]
        kind = CLASSES[chosen] if cuda else None
        if len(known) == 1:
            found = measured[known[0]]
            factors = {phase: list(each) for phase, each in found.factors.items()}
            said = f"factors measured on {known[0]}"
            return cls(found.rates, found.item, factors, kind, named=False, said=said)
        if kind is None:
            return None
        said = (
            f"floors at the peak speeds of the {kind.source}; no factors are known for a device of this size"
        )
        if name is not None:
            said = f"default factors for {chosen} at the peak speeds of the {kind.source}"
        return cls(kind.rates, 2, None, kind, named=name is not None, said=said)

    def step(
        self, config: TrainConfig, shape: ModelShape, lengths: Lengths, slots: int | None = None
    ) -> dict[str, float]:
        """Return the seconds of each phase, and of the whole `step`.

        Args:
            config: the config.
            shape: see `step_work`.
            lengths: the lengths of the step's sequences.
            slots: number of sequences that fit into a rollout engine's KV cache, if this limits the running
                sequences.
        """
        at = "actor_rollout_ref.rollout.max_num_seqs"
        running = config.actor_rollout_ref.rollout.max_num_seqs
        if slots is not None and slots < running:
            config = with_value(config, at, max(1, slots))
        work = step_work(config, shape, lengths.prompts, lengths.responses.ravel(), item=self.item)
        if self.factors is not None:
            found = predict(work, self.rates, self.factors)
        elif self.named:
            found = predict(work, self.rates, dict.fromkeys(work, EFFICIENCY))
        else:
            found = {phase: each.floor(self.rates) for phase, each in work.items()}
        step = found.pop("step", sum(found.values()))
        links = link_seconds(config, shape, work, self.kind) if self.kind is not None else 0.0
        return {**found, "links": links, "step": step + links}

    def stages(
        self, config: TrainConfig, shape: ModelShape, lengths: Lengths, slots: int | None = None
    ) -> Stages:
        """Return the seconds of the stages of a step; see `step`.

        If the rollout is on other devices, the transfer sends the weights over a link once.
        """
        found = self.step(config, shape, lengths, slots)
        whole = with_value(config, "actor_rollout_ref.rollout.tensor_model_parallel_size", 1)
        training = self.step(whole, shape, lengths, slots)["links"]
        trainer, transfer = config.trainer, found["weights"]
        if self.kind is not None and trainer.placed("actor") != trainer.placed("rollout"):
            link = self.kind.near if trainer.world_size <= PER_NODE else self.kind.far
            transfer += self.item * shape.streamed() / link
        generation = found["generate_sequences"] + found["reward"] + found["links"] - training
        return Stages(generation, found["step"] - generation - found["weights"], transfer)


@dataclass(frozen=True, slots=True)
class Judge:
    """An evaluator that computes the memory plan and the time of a config.

    Attributes:
        device: bytes of one device's memory.
        shapes: a function that returns the shape of the model at a path.
        clock: the speeds of the device; None for a CPU that was not measured.
        lengths: the lengths of a step's sequences.
        accepts: a function that returns whether the config rules allow the given keys and values.
    """

    device: float
    shapes: Callable[[str], ModelShape]
    clock: Clock | None
    lengths: Lengths
    accepts: Callable[[Mapping[str, Any]], bool] = lambda keys: True

    def plan(self, config: TrainConfig) -> Plan:
        """Return the memory plan of a config."""
        return plan(config, self.shapes, self.device)

    def timer(self, config: TrainConfig) -> tuple[Clock, ModelShape]:
        """Return the speeds of the device, and the shape of the policy.

        Raises:
            ConfigError: the device is a CPU that was not measured, so the seconds cannot be predicted.
        """
        if self.clock is None:
            raise ConfigError(
                "times are known only for GPUs, and for a CPU that was measured",
                field="trainer.device",
                got="cpu",
                remedy="run `tandem bench` once, or set trainer.device=cuda",
            )
        return self.clock, self.shapes(config.actor_rollout_ref.model.path)

    def seconds(self, config: TrainConfig, slots: int | None) -> float:
        """Return the seconds of a step.

        `slots` is the number of sequences that fit into the rollout's KV cache; None: all sequences fit.
        """
        clock, shape = self.timer(config)
        return clock.step(config, shape, self.lengths, slots)["step"]

    def stages(self, config: TrainConfig, made: Plan) -> Stages:
        """Return the seconds of the stages of a step, for a config and its memory plan."""
        clock, shape = self.timer(config)
        return clock.stages(config, shape, self.lengths, made.slots)
