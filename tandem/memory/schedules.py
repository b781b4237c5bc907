"""Schedules of generation and learning, with the devices that each has, compared by the plan of memory and
the model of time: one after the other, on the same devices or on devices of their own, or each step's
responses written while the step before is learnt from."""

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
    """A schedule with its devices.

    Attributes:
        name: in words.
        staleness: steps by which the weights that write are behind those that learn; above 0 it is not one
            that a config can ask for.
        training, rollout: devices of each; together they have the same.
        stages, step: seconds.
        waits: the share of a step in which the devices of each wait for the other.
        left: bytes that are left on a device at the worst moment, by pool; below 0, that are lacking.
        keys: what the config sets for it.
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
        """Smaller is better: what fits is before what does not, then what is fast."""
        return min(self.left.values()) < 0, self.step


def compare(config: TrainConfig, judge: Judge) -> list[Schedule]:
    """The schedules of a run on its devices: together, apart, and apart one step off; the last two with the
    best split of the devices.

    Raises:
        ConfigError: see `refuse_apart`; or no split suits, or nothing tells seconds.
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
                "no split of the devices suits the sizes of training and of the rollout",
                field="--schedule",
                got=f"{config.trainer.world_size} devices",
                remedy="take more devices, or smaller parallel sizes",
            )
        found.append(best)
    return found


def chosen(found: Sequence[Schedule]) -> Schedule:
    """The best that a config can ask for."""
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
    """Every number of devices for the rollout, the last of the nodes, that leaves training what it can
    divide."""
    nodes, per, policy = config.trainer.nnodes, config.trainer.n_gpus_per_node, config.actor_rollout_ref
    sections: dict[str, Any] = {"actor": policy.actor, "ref": policy.ref, "critic": config.critic}
    units = set[int]()  # what the devices of training must be multiples of
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
    """Refuses a config whose generation and learning cannot be divided between devices, or not overlap.

    Raises:
        ConfigError: what stands in the way.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    filters, sampler = config.algorithm.filter_groups, config.data.sampler
    ahead = "which prompts come next depends on the answers before: none can be answered ahead"
    elsewhere = "responses come from servers, whose devices are not the run's"
    for field, applies, message in (
        ("trainer.resource_pools", trainer.resource_pools or trainer.placement, "roles are placed already"),
        ("actor_rollout_ref.rollout.name", rollout.on_named_servers, elsewhere),
        ("--devices", trainer.world_size < 2, "one device cannot be divided"),
        ("algorithm.filter_groups.enable", filters.enable, ahead),
        ("data.sampler", sampler.class_name is not None, ahead),
    ):
        if applies:
            raise ConfigError(message, field=field, expected="generation and learning that can be apart")
