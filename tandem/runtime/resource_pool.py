"""Resource pools: the processes of a run, and the roles that run on them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from tandem.errors import ConfigError


class Role(Enum):
    """The role of a worker group in the algorithm, such as actor or critic.

    A name that combines several roles means that these roles share weights or a process.
    """

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
    """A pool of processes on one or more nodes.

    Args:
        process_on_nodes: The number of processes on each node, such as [8] * 4.
        name: The name of the pool, for messages. Pools of one backend need different names.
        on_device: Whether each process gets a separate device.
        beside_controller: Whether the processes are helpers on the controller's machine. No resources are
            reserved for helpers.

    Raises:
        ConfigError: The list of nodes is empty, or a node has no processes.
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
                "this is not a list of processes per node",
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
    """The assignment of roles to pools. Roles on the same pool are colocated.

    Args:
        resource_pool_spec: For each pool: the number of processes on each node.
        mapping: For each role: the name of its pool. If a role has several models, a model that is not on the
            role's pool has a separate entry, such as "ref.NAME".

    Raises:
        ConfigError: A pool is malformed, or a role is on a pool that does not exist.
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
        """A dict from name to pool. A pool that runs only reward functions has no devices."""
        return {
            name: ResourcePool(counts, name, on_device=self.roles(name) != (Role.Reward,))
            for name, counts in self.resource_pool_spec.items()
        }

    def pool(self, role: Role) -> ResourcePool:
        """Return the pool of a role.

        Raises:
            ConfigError: The role has no pool.
        """
        if role not in self.mapping:
            raise ConfigError(
                "no resource pool is mapped to this role",
                field=role.name,
                expected=f"one of {', '.join(map(role_name, self.mapping))}",
            )
        return self.pools[self.mapping[role]]

    def roles(self, pool_name: str) -> tuple[Role | str, ...]:
        """Return the roles on a pool."""
        return tuple(role for role, name in self.mapping.items() if name == pool_name)


def role_name(role: Role | str) -> str:
    """Return the name of a placement's role, for messages."""
    return role if isinstance(role, str) else role.name
