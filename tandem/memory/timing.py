"""The seconds of a run's step on a kind of device, from measured or published speeds."""

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
    """The seconds of the stages of a step.

    Attributes:
        generation: generation of the responses and their rewards.
        training: everything that follows.
        transfer: transfer of the new weights to the rollout, in which both sides take part.
    """

    generation: float
    training: float
    transfer: float

    def step(self, *, ahead: bool) -> float:
        """Return the seconds of one of many steps.

        Args:
            ahead: whether responses are generated one step ahead. The step then takes the longer of the two
                sides plus the transfer, otherwise the sum.
        """
        both = max(self.generation, self.training) if ahead else self.generation + self.training
        return both + self.transfer


@dataclass(frozen=True, slots=True)
class Clock:
    """The speeds that give the seconds of a step.

    Attributes:
        rates: the best speeds of the device; see `tandem.memory.device_file.Device`.
        item: bytes of a number; see there.
        factors: the factors of measured phases; None: phases take their floors, or `EFFICIENCY` applies.
        kind: the kind of device whose links count; None: no links count.
        named: whether the user named the kind. Default factors then apply.
        said: a text about the source of these speeds.
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
            measured: the devices of the device file, by name.
            name: name of a published kind, if the user named one.
            gigabytes: the device's memory.
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
            slots: number of sequences in a rollout engine's cache, if that is fewer than may run.
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
        """Return the seconds of a step's two sides; see `step`.

        Weights for a rollout on other devices go over a link once.
        """
        found = self.step(config, shape, lengths, slots)
        whole = with_value(config, "actor_rollout_ref.rollout.tensor_model_parallel_size", 1)
        training = self.step(whole, shape, lengths, slots)["links"]
        trainer, transfer = config.trainer, found["weights"]
        if self.kind is not None and trainer.placed("actor") != trainer.placed("rollout"):
            link = self.kind.near if trainer.world_size <= PER_NODE else self.kind.far
            transfer += self.item * (shape.matrices + shape.embedding) / link
        generation = found["generate_sequences"] + found["reward"] + found["links"] - training
        return Stages(generation, found["step"] - generation - found["weights"], transfer)


@dataclass(frozen=True, slots=True)
class Judge:
    """A rating of configs by memory and time.

    Attributes:
        device: bytes of one device.
        shapes: returns the shape of the model at a path.
        clock: the speeds of the device; None for a CPU that was not measured.
        lengths: the lengths of a step's sequences.
        accepts: returns whether the rules of configs allow these keys.
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
        """Return the clock, and the policy's shape.

        Raises:
            ConfigError: there is no source for the seconds.
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
        """Return the seconds of a step with so many sequences in the rollout's cache; None: with all."""
        clock, shape = self.timer(config)
        return clock.step(config, shape, self.lengths, slots)["step"]

    def stages(self, config: TrainConfig, made: Plan) -> Stages:
        """Return the seconds of the two sides of a step, for the plan of a config."""
        clock, shape = self.timer(config)
        return clock.stages(config, shape, self.lengths, made.slots)
