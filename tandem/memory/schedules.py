"""A comparison of schedules for generation and training on the devices of a run.

Each schedule assigns devices to generation and training. The memory plan and the time model determine its
cost. There are three schedules:

- Generation and training alternate on the same devices.
- They alternate on separate devices.
- They run at the same time on separate devices, and training uses the responses of the previous step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from tandem.config.root import TrainConfig
from tandem.errors import ConfigError
from tandem.memory.levers import with_values
from tandem.memory.plan import Plan
from tandem.memory.timing import Judge, Stages


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule, with its division of the devices and its cost.

    Attributes:
        name: a name for the user.
        staleness: number of steps by which the weights of the rollout are older than the trained weights. A
            config cannot select a schedule with a staleness above 0.
        training: number of devices for training. If both use the same devices, `training` and `rollout` are
            the number of all devices.
        rollout: number of devices for generation.
        stages: the seconds of each stage.
        step: the seconds of a step.
        waits: a dict from "training" and "rollout" to the fraction of a step in which their devices are idle.
        left: a dict from pool to the free bytes of a device at the moment of peak memory; negative if bytes
            are missing.
        keys: a dict from config key to value that selects this schedule.
    """

    name: str
    staleness: int
    training: int
    rollout: int
    stages: Stages
    step: float
    waits: Mapping[str, float]
    left: Mapping[str, float]
    keys: Mapping[str, Any]

    @property
    def order(self) -> tuple[bool, float]:
        """The sort key; smaller is better. Schedules that fit are first, sorted by speed."""
        return min(self.left.values()) < 0, self.step


def compare(config: TrainConfig, judge: Judge) -> list[Schedule]:
    """Return the three schedules of a run: same devices, separate devices, and one step off.

    The schedules with separate devices use the best division of the devices.

    Args:
        config: the config.
        judge: the object that computes the memory plan and the seconds of a config.

    Raises:
        ConfigError: see `refuse_apart`. Also if no division is possible, or if the device is a CPU that was
            not measured.
    """
    refuse_apart(config)
    tried = []
    for keys in ({}, *_splits(config)):
        changed = with_values(config, keys)
        made = judge.plan(changed)
        tried.append((changed, keys, made, judge.stages(changed, made)))
    found = [_schedule(*tried[0], ahead=False)]
    for ahead in (False, True):
        apart = sorted((_schedule(*each, ahead=ahead) for each in tried[1:]), key=attrgetter("order"))
        best = next((each for each in apart if judge.accepts(each.keys)), None)
        if best is None:
            raise ConfigError(
                "no split of the devices works with the parallel sizes of training and rollout",
                field="--schedule",
                got=f"{config.trainer.world_size} devices",
                remedy="use more devices, or smaller parallel sizes",
            )
        found.append(best)
    return found


def chosen(found: Sequence[Schedule]) -> Schedule:
    """Return the best schedule that a config can select."""
    return min((each for each in found if not each.staleness), key=attrgetter("order"))


def _schedule(
    config: TrainConfig, keys: Mapping[str, Any], made: Plan, stages: Stages, *, ahead: bool
) -> Schedule:
    step, apart = stages.step(ahead=ahead), bool(keys)
    devices = config.trainer.devices_of("actor"), config.trainer.devices_of("rollout")
    busy = {"training": stages.training, "rollout": stages.generation}
    left: dict[str, float] = {}
    for phase in made.phases:
        left[phase.pool] = min(left.get(phase.pool, made.device), made.device - phase.needed)
    waits = {role: (1 - (each + stages.transfer) / step) * apart for role, each in busy.items()}
    name = "one step off, apart" if ahead else f"synchronous, {'apart' if apart else 'together'}"
    return Schedule(name, int(ahead), *devices, stages, step, waits, left, keys)


def _splits(config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Yield the config keys of each possible division into training and rollout devices.

    The rollout gets the last devices of the nodes. The parallel sizes of training must divide the number of
    remaining devices.
    """
    nodes, per, policy = config.trainer.nnodes, config.trainer.n_gpus_per_node, config.actor_rollout_ref
    sections: dict[str, Any] = {"actor": policy.actor, "ref": policy.ref, "critic": config.critic}
    units = set[int]()  # the number of training devices must be a multiple of each of these
    for role, section in sections.items():
        if role in config.roles:
            fsdp = section.fsdp_config
            split = fsdp.tensor_parallel_size * fsdp.pipeline_parallel_size
            units |= {split * max(1, fsdp.fsdp_size), split * section.ulysses_sequence_parallel_size}
    for rollout in range(policy.rollout.split, nodes * per, policy.rollout.split):
        if any((nodes * per - rollout) % unit for unit in units):
            continue
        whole, rest = divmod(rollout, per)
        training = (*[per] * (nodes - whole - bool(rest)), *([per - rest] if rest else []))
        pools = {"training": training, "rollout": (*([rest] if rest else []), *[per] * whole)}
        yield {"trainer.resource_pools": pools, "trainer.placement": {"rollout": "rollout"}}


def refuse_apart(config: TrainConfig) -> None:
    """Check that generation and training can run on separate devices and overlap.

    Args:
        config: the config.

    Raises:
        ConfigError: they cannot run on separate devices, or they cannot overlap.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    filters, sampler = config.algorithm.filter_groups, config.data.sampler
    ahead = "the next prompts depend on earlier responses, so no response can be generated in advance"
    elsewhere = "responses come from servers, whose devices are not part of the run"
    for field, applies, message in (
        (
            "trainer.resource_pools",
            trainer.resource_pools or trainer.placement,
            "the roles already have devices",
        ),
        ("actor_rollout_ref.rollout.name", rollout.on_named_servers, elsewhere),
        ("--devices", trainer.world_size < 2, "one device cannot be divided"),
        ("algorithm.filter_groups.enable", filters.enable, ahead),
        ("data.sampler", sampler.class_name is not None, ahead),
    ):
        if applies:
            raise ConfigError(
                message, field=field, expected="a run whose generation and training can use separate devices"
            )
