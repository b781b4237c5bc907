"""Decide the worker groups of a run: the class and processes of each role, and the methods it must have.

Roles are actor, rollout, reference, critic, reward model, reward, data and batch. Several roles may share one
group of workers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeGuard

from tandem.algorithms.registry import AdvantageSpec
from tandem.config.cluster import kind_of, place
from tandem.config.root import TrainConfig
from tandem.errors import ConfigError
from tandem.loading import load_module
from tandem.runtime import Placement, ResourcePool, Role, Worker
from tandem.runtime.resource_pool import role_name
from tandem.runtime.worker import registrations
from tandem.workers.actor import ActorWorker
from tandem.workers.batch import BatchWorker
from tandem.workers.critic import CriticWorker
from tandem.workers.data import DataWorker
from tandem.workers.reward import RewardWorker
from tandem.workers.reward_model import RewardModelWorker

CONTROLLER_POOL = ResourcePool([1], "controller_pool", on_device=False, beside_controller=True)
"""The separate process that reads the data and computes over whole batches."""
REWARD_POOL = ResourcePool([1], "reward_pool", on_device=False, beside_controller=True)
"""The process of the reward functions, if the config does not place the reward functions elsewhere."""

PLACES = {
    "actor": (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef),
    "rollout": (Role.Rollout, Role.ActorRollout, Role.ActorRolloutRef),
    "ref": (Role.RefPolicy, Role.ActorRolloutRef),
    "critic": (Role.Critic,),
    "reward_model": (Role.RewardModel,),
    "reward": (Role.Reward,),
}
"""For each role, the names that a placement may use for the role, the most specific name first."""


@dataclass(frozen=True, slots=True)
class Need:
    """A set of methods that a run calls for the same reason.

    Attributes:
        key: The config key that causes the calls; empty if no key does.
        methods: A dict from role to method names, separated by spaces.
        asked: Returns whether a config with this advantage estimator needs the methods; None: the methods are
            needed if the key's value is true.
    """

    key: str
    methods: Mapping[str, str]
    asked: Callable[[TrainConfig, AdvantageSpec], bool] | None = None


def _resets_reference(config: TrainConfig) -> bool:
    return config.needs_reference and config.actor_rollout_ref.ref.reset_interval > 0


ALWAYS = {
    "actor": "compute_log_prob update_actor save_checkpoint load_checkpoint",
    "rollout": "generate_sequences",
    "ref": "compute_ref_log_prob",
    "critic": "compute_values update_critic save_checkpoint load_checkpoint",
    "reward_model": "compute_rm_score",
    "reward": "compute_scores",
    "batch": "compute_advantages measure measure_validation write_samples",
    "data": "describe train_batch val_batch",
}
"""The methods that every run calls, keyed by role.

If a rollout class also has `stream_sequences`, its samples are scored as they finish. `take_observed` and
`take_timings` are called on classes that have these methods.
"""
APART = {"actor": "weight_buckets export_weights", "rollout": "load_weights"}
"""The methods that a run calls if its rollout is not part of the actor's group."""
NEEDS = (
    Need(
        "algorithm.kl_penalty, actor_rollout_ref.actor.kl_loss_type",
        {"ref": "reference_head", "actor": "hold_reference_head"},
        lambda config, _: config.exact_kl,
    ),
    Need(
        "actor_rollout_ref.ref.reset_interval",
        {
            "ref": "load_reference save_checkpoint load_checkpoint",
            "actor": "weight_buckets export_weights reset_optimizer",
        },
        lambda config, _: _resets_reference(config),
    ),
    Need(
        "algorithm.adv_estimator",
        {"batch": "reward_baselines"},
        lambda _, spec: "reward_baselines" in spec.columns,
    ),
    Need("algorithm.filter_groups.enable", {"batch": "group_spread", "data": "recall"}),
    Need("reward_model.overlong_buffer.enable", {"batch": "punish_overlong"}),
    Need("algorithm.mask_truncated_completions", {"batch": "left_out"}),
    Need(
        "reward_model.enable, reward.combine",
        {"batch": "combine_scores"},
        lambda config, _: config.reward_model.enable or config.reward.combine is not None,
    ),
    Need(
        "reward_model.models",
        {"batch": "running_scores"},
        lambda config, _: any(term.normalize for term in config.reward_model.scorers.values()),
    ),
    Need("reward.on_error", {"batch": "stand_in left_out"}, lambda config, _: config.leaves_out_failed),
    Need("data.sampler.class_name", {"data": "observe sampler_state load_sampler_state"}),
    Need("trainer.async_save", {"actor": "begin_save check_save", "critic": "begin_save check_save"}),
    Need(
        "trainer.async_save",
        {"ref": "begin_save check_save"},
        lambda config, _: config.trainer.async_save and _resets_reference(config),
    ),
)
"""The other methods that a run calls, with the config key that causes the calls."""


@dataclass(frozen=True)
class GroupPlan:
    """The description of one group of workers.

    Attributes:
        role: The name of the group.
        parts: All roles of the group.
        pool: The processes of the group.
        worker: The worker class.
    """

    role: str
    parts: frozenset[str]
    pool: ResourcePool
    worker: type[Worker]


@dataclass(frozen=True)
class RolePlan:
    """The roles of a run and their worker classes.

    Attributes:
        played: The roles of `PLACES` that the run has. If a role has several models, each model's role is
            named `role.NAME`.
        classes: A dict from role to the user's own worker class. All other roles use the default class.
        needs: The methods that the run calls on the workers, in addition to `ALWAYS`.
    """

    played: frozenset[str]
    classes: Mapping[str, type[Worker]] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()


def plan_roles(config: TrainConfig, spec: AdvantageSpec) -> tuple[RolePlan, dict[str, GroupPlan]]:
    """Return the roles of a run, and its worker groups as the config places them.

    If the advantage estimator reads a critic's values or a reference's log-probs, the run also has the role
    critic or reference.

    Raises:
        ConfigError: A user-defined worker class cannot be used.
    """
    trainer, classes = config.trainer, load_classes(config.trainer.worker_classes)
    reference = config.needs_reference or "ref_log_probs" in spec.columns
    played = frozenset(config.roles_with(reference=reference, critic="values" in spec.columns))
    needs = [
        need
        for need in NEEDS
        if (attrgetter(need.key)(config) if need.asked is None else need.asked(config, spec))
    ]
    role_plan = RolePlan(played, classes, tuple(needs))
    places = {names[0]: trainer.placed(role) for role, names in PLACES.items()}
    known: dict[Role | str, str] = {role: pool for role, pool in places.items() if pool is not None}
    known |= {role: pool for role, pool in trainer.placement.items() if role != kind_of(role)}
    return role_plan, plan_groups(Placement(trainer.pools, known), role_plan)


def load_classes(references: Mapping[str, str]) -> dict[str, type[Worker]]:
    """Load the user's own worker classes.

    Args:
        references: A dict from role to `file.py:Class` or `package.module:Class`.

    Returns:
        A dict from role to class.

    Raises:
        ConfigError: The module or class does not exist, or the class is not a worker.
    """
    found: dict[str, type[Worker]] = {}
    for role, reference in references.items():
        module, name = load_module(reference)
        named = getattr(module, name, None)
        if not _is_worker(named):
            workers = [key for key, value in vars(module).items() if _is_worker(value)]
            near = difflib.get_close_matches(name, workers, n=1)
            raise ConfigError(
                "this worker class does not exist" if named is None else "this is not a worker class",
                field=f"trainer.worker_classes.{role}",
                got=reference,
                expected="a subclass of tandem.runtime.Worker; the module has "
                f"{', '.join(workers) or 'none'}",
                remedy=f"did you mean '{near[0]}'?" if near else None,
            )
        found[role] = named
    return found


def _is_worker(value: object) -> TypeGuard[type[Worker]]:
    return isinstance(value, type) and issubclass(value, Worker)


def plan_groups(placement: Placement, role_plan: RolePlan) -> dict[str, GroupPlan]:
    """Return the worker groups of a run, keyed by role.

    Actor, rollout and reference are one group if they are on the same pool. The group then shares its
    weights. A role with the user's own worker class has a separate group. The data worker and the batch
    worker run in parallel to the controller.

    Args:
        placement: The pools, and the pool of each role.
        role_plan: The roles of the run, and their worker classes.

    Raises:
        ConfigError: A role has no pool, or a worker class lacks a method.
    """
    played, classes = role_plan.played, role_plan.classes
    pools = {role: _pool(placement, role) for role in played}
    apart = pools["actor"] != pools["rollout"] or bool({"actor", "rollout"} & set(classes))
    key = "actor" if apart else "actor_rollout"
    policy = classes.get(key, ActorWorker)
    parts = {"actor"} if apart else {"actor", "rollout"}
    if "ref" in played and pools["ref"] == pools["actor"] and "ref" not in classes:
        parts |= {"ref"} if "compute_ref_log_prob" in registrations(policy) else set()
    pools |= {"data": CONTROLLER_POOL, "batch": CONTROLLER_POOL}
    out = {"actor": GroupPlan("actor", frozenset(parts), pools["actor"], policy)}
    for role in ("data", *sorted(played - parts), "batch"):
        kind = kind_of(role)
        out[role] = GroupPlan(role, frozenset({role}), pools[role], classes.get(kind, _DEFAULT_CLASSES[kind]))
    needs = (Need("", ALWAYS), *role_plan.needs, *([Need("", APART)] if apart else []))
    for role, group_plan in out.items():
        named = key if role == "actor" else kind_of(role)
        _require_methods(group_plan, needs, named)
    return out


def pools_of(placed: Mapping[str, GroupPlan]) -> dict[str, ResourcePool]:
    """Return the pools of a run, keyed by name. The pool of the data and batch workers is first."""
    return {
        pool.name: pool for pool in (CONTROLLER_POOL, *(group_plan.pool for group_plan in placed.values()))
    }


def _require_methods(group_plan: GroupPlan, needs: Sequence[Need], role: str) -> None:
    """Check that a worker class has all methods that the run calls.

    Args:
        group_plan: The group to check.
        needs: The methods that the run calls.
        role: The key in `trainer.worker_classes` that sets this class, for the message.

    Raises:
        ConfigError: Methods are missing. The error names the methods and the config key that needs them.
    """
    wanted: dict[str, list[str]] = {}
    for need in needs:
        for part in sorted(group_plan.parts):
            wanted.setdefault(need.key, []).extend(need.methods.get(kind_of(part), "").split())
    for key, methods in wanted.items():
        missing = [method for method in methods if method not in registrations(group_plan.worker)]
        if missing:
            raise ConfigError(
                f"this key needs methods that the worker class of role {role} does not have"
                if key
                else "the worker class lacks methods that the training loop calls",
                field=key or f"trainer.worker_classes.{role}",
                got=f"{group_plan.worker.__name__} without {', '.join(missing)}",
                expected=f"methods with @register: {', '.join(methods)}",
                remedy=f"add them, or derive trainer.worker_classes.{role} from the default class",
            )


def _pool(placement: Placement, role: str) -> ResourcePool:
    """Return a role's pool, or the config's default pool if the role has no separate pool."""
    placed = {
        part: placement.mapping[name]
        for part, names in PLACES.items()
        for name in reversed(names)  # the most specific name comes last and wins
        if name in placement.mapping
    }
    placed |= {name: pool for name, pool in placement.mapping.items() if isinstance(name, str)}
    if "actor" not in placed:
        raise ConfigError(
            "no resource pool is mapped to the actor",
            field="placement",
            got=", ".join(map(role_name, placement.mapping)) or "no role",
            expected="one of Actor, ActorRollout, ActorRolloutRef among the roles",
        )
    pool = place(role, placement.pools, placed)
    return REWARD_POOL if pool is None else placement.pools[pool]


_DEFAULT_CLASSES: dict[str, type[Worker]] = {
    "data": DataWorker,
    "batch": BatchWorker,
    "rollout": ActorWorker,
    "ref": ActorWorker,
    "critic": CriticWorker,
    "reward_model": RewardModelWorker,
    "reward": RewardWorker,
}
