"""The seconds of a run's step on a kind of device: by what was measured there or is published."""

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
    """The seconds of a step.

    Attributes:
        generation: of the responses and their rewards.
        training: of all that follows.
        transfer: of the new weights to the rollout, in which both sides take part.
    """

    generation: float
    training: float
    transfer: float

    def step(self, *, ahead: bool) -> float:
        """Of a step among many: the sum, or, where responses are written ahead, the longer of the two sides
        and the transfer between them."""
        both = max(self.generation, self.training) if ahead else self.generation + self.training
        return both + self.transfer


@dataclass(frozen=True, slots=True)
class Clock:
    """What tells the seconds of a step.

    Attributes:
        rates, item: of the device, see `tandem.memory.device_file.Device`.
        factors: of the phases that were measured; None: phases take their floors, or `EFFICIENCY`.
        kind: whose links count; None: no link does.
        named: whether the user named the kind, so that default factors hold for it.
        said: where all this comes from.
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
        """The clock of a device; None: of a CPU that was not measured.

        Args:
            measured: the devices of the file, by name.
            name: of a published kind, where one was named.
            gigabytes: of its memory.
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
        said = f"floors, by the peaks of the {kind.source}; no factors are known for a device of that size"
        if name is not None:
            said = f"default factors for {chosen}, over the peaks of the {kind.source}"
        return cls(kind.rates, 2, None, kind, named=name is not None, said=said)

    def step(
        self, config: TrainConfig, shape: ModelShape, lengths: Lengths, slots: int | None = None
    ) -> dict[str, float]:
        """Seconds of each phase, and of the `step`.

        Args:
            shape: see `step_work`.
            slots: sequences that a rollout engine's cache holds, where these are fewer than it may run.
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
        """Seconds of a step's two sides; see `step`. Weights for a rollout on other devices go over a link
        once."""
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
    """What says how good a config is.

    Attributes:
        device: bytes of one.
        shapes: of models, by their paths.
        clock: None: of a CPU that was not measured.
        lengths: of a step's sequences.
        accepts: whether the rules of configs allow these keys.
    """

    device: float
    shapes: Callable[[str], ModelShape]
    clock: Clock | None
    lengths: Lengths
    accepts: Callable[[Mapping[str, Any]], bool] = lambda keys: True

    def plan(self, config: TrainConfig) -> Plan:
        """What a config holds."""
        return plan(config, self.shapes, self.device)

    def timer(self, config: TrainConfig) -> tuple[Clock, ModelShape]:
        """The clock, and the policy's shape.

        Raises:
            ConfigError: nothing tells seconds.
        """
        if self.clock is None:
            raise ConfigError(
                "seconds are known of GPUs, and of a CPU that was measured",
                field="trainer.device",
                got="cpu",
                remedy="run tandem bench once, or take trainer.device=cuda",
            )
        return self.clock, self.shapes(config.actor_rollout_ref.model.path)

    def seconds(self, config: TrainConfig, slots: int | None) -> float:
        """What a step takes, with so many sequences in the rollout's cache; None: with all."""
        clock, shape = self.timer(config)
        return clock.step(config, shape, self.lengths, slots)["step"]

    def stages(self, config: TrainConfig, made: Plan) -> Stages:
        """What the two sides of a step take, by the plan of a config."""
        clock, shape = self.timer(config)
        return clock.stages(config, shape, self.lengths, made.slots)
