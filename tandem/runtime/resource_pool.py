"""Resource pools: the processes of a run, and the roles that run on them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from tandem.errors import ConfigError


class Role(Enum):
    """The part of a group of workers in the algorithm; several in one name share weights or a process."""

    Actor = auto()
    Rollout = auto()
    RefPolicy = auto()
    ActorRollout = auto()
    ActorRolloutRef = auto()
    Critic = auto()
    RewardModel = auto()
    Reward = auto()


@dataclass(unsafe_hash=True)
class ResourcePool:
    """Processes on nodes.

    Args:
        process_on_nodes: processes per node, such as [8] * 4.
        name: for messages; pools of one backend have different names.
        on_device: whether each process gets a device of its own.
        beside_controller: helpers on the controller's machine, for which nothing is reserved.

    Raises:
        ConfigError: no node, or a node without a process.
    """

    process_on_nodes: Sequence[int]
    name: str = "pool"
    on_device: bool = True
    beside_controller: bool = False

    def __post_init__(self) -> None:
        counts = self.process_on_nodes
        valid = isinstance(counts, (list, tuple)) and len(counts) > 0
        if not valid or not all(type(count) is int and count >= 1 for count in counts):
            raise ConfigError(
                "not a list of processes per node",
                field=f"resource pool '{self.name}'",
                got=repr(counts),
                expected="one whole number >= 1 per node, such as [8, 8]",
            )
        self.process_on_nodes = tuple(counts)

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    @property
    def nnodes(self) -> int:
        return len(self.process_on_nodes)


@dataclass(frozen=True)
class Placement:
    """The assignment of roles to pools. Roles mapped to one pool are colocated.

    Args:
        resource_pool_spec: pool name to processes per node.
        mapping: role to pool name; one of several models of a role by name, such as "ref.NAME", where it is
            not with the others.

    Raises:
        ConfigError: a malformed pool, or a role on a pool that is not there.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Role | str, str]

    def __post_init__(self) -> None:
        pools = self.pools
        for role, name in self.mapping.items():
            if name not in pools:
                near = difflib.get_close_matches(name, pools, n=1)
                raise ConfigError(
                    "no such resource pool",
                    field=f"pool of role {role_name(role)}",
                    got=name,
                    expected=f"one of {', '.join(pools) or 'no pools'}",
                    remedy=f"did you mean '{near[0]}'?" if near else "add it to the resource pools",
                )

    @cached_property
    def pools(self) -> Mapping[str, ResourcePool]:
        """The pools by name. Reward functions alone need no device."""
        return {
            name: ResourcePool(counts, name, on_device=self.roles(name) != (Role.Reward,))
            for name, counts in self.resource_pool_spec.items()
        }

    def pool(self, role: Role) -> ResourcePool:
        """The pool of a role.

        Raises:
            ConfigError: the role has none.
        """
        if role not in self.mapping:
            raise ConfigError(
                "no resource pool is mapped to this role",
                field=role.name,
                expected=f"one of {', '.join(map(role_name, self.mapping))}",
            )
        return self.pools[self.mapping[role]]

    def roles(self, pool_name: str) -> tuple[Role | str, ...]:
        """The roles colocated on a pool."""
        return tuple(role for role, name in self.mapping.items() if name == pool_name)


def role_name(role: Role | str) -> str:
    """A role of a placement by name, for messages."""
    return role if isinstance(role, str) else role.name
