"""Start the worker groups of a run, and move them to other processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

from tandem.config.cluster import kind_of
from tandem.config.trainer import RunConfig
from tandem.errors import ConfigError, TandemError, WorkerFailure
from tandem.observability.run import RunFolder
from tandem.runtime import Backend, LocalBackend, Placement, ResourcePool, WorkerGroup
from tandem.runtime.worker import WorkerFactory
from tandem.trainer.beforehand import Prepared
from tandem.trainer.casting import GroupPlan, plan_groups, pools_of
from tandem.trainer.here import crowded
from tandem.trainer.roles import Roles
from tandem.trainer.scoring import Scoring
from tandem.trainer.steps import Plan, updates_per_step
from tandem.watch.batches import SpecialTokens, certain

RAY = "tandem.runtime.ray_backend:RayBackend"


def make_backend(trainer: RunConfig, name: str, run: RunFolder, say: Callable[[str], None]) -> Backend:
    """Return the backend that the config asks for.

    Args:
        trainer: The `trainer` section of the config.
        name: The name of the run, for Ray's dashboard and for files.
        run: The run folder.
        say: Prints a sentence for the user.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address that the config names.
    """
    if trainer.resolved_backend == "local":
        return LocalBackend()
    make = ray_backend(asked=trainer.backend)
    if slow := crowded(trainer):
        say(slow)
    cluster, timeouts = trainer.cluster, trainer.timeouts
    on_sigterm = signal.getsignal(signal.SIGTERM)
    backend = make(
        name,
        run.logs,
        device=trainer.device,
        address=cluster.address,
        namespace=cluster.namespace,
        interface=cluster.interface,
        master_port=cluster.master_port,
        object_store_gb=cluster.object_store_gb,
        temp_dir=cluster.temp_dir,
        ray_init=cluster.ray_init,
        start_s=timeouts.start,
        call_s=timeouts.call,
        answer_s=timeouts.answer,
        collective_s=timeouts.collective,
        resources_s=timeouts.resources,
        stop_s=timeouts.stop,
        say=say,
    )
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray has installed a handler that exits at once
    return backend


@contextmanager
def plain_errors() -> Iterator[None]:
    """Replace a `WorkerFailure` inside the block by its cause, if the cause is a `TandemError`."""
    try:
        yield
    except WorkerFailure as failure:
        if isinstance(failure.__cause__, TandemError):
            raise failure.__cause__ from None
        raise


def ray_backend(*, asked: str) -> Callable[..., Backend]:
    """Return the class of the Ray backend.

    Args:
        asked: The `trainer.backend` of the config, for the message.

    Raises:
        ConfigError: Ray is not installed.
    """
    module, attribute = RAY.split(":")
    try:
        make: Callable[..., Backend] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "Ray is not installed, and several processes need it",
            field="trainer.backend",
            got=asked,
            remedy="pip install 'tandem[ray]', or configure the run for one process",
        ) from error
    return make


@dataclass
class Launcher:
    """Starts and moves the worker groups of a run.

    Attributes:
        prepared: The checked config, with the roles and the arguments of the workers.
        plan: The plan of the run.
        backend: Where the workers run.
        run: The run folder.
    """

    prepared: Prepared
    plan: Plan
    backend: Backend
    run: RunFolder
    _pools: dict[str, ResourcePool] = field(default_factory=dict, init=False)

    def launch(self, placed: Mapping[str, GroupPlan], data: WorkerGroup, scoring: Scoring) -> Roles:
        """Start all worker groups except the data group, in processes that are already reserved.

        Args:
            placed: A dict from role to the group to start.
            data: The group that reads the data. It already runs.
            scoring: Computes rewards from scores.

        Raises:
            TandemError: A model cannot be loaded, or a worker raises another error.
        """
        self._pools = pools_of(placed)
        config, reward, groups = self.prepared.config, self.prepared.reward, {"data": data}
        policy, balance = config.actor_rollout_ref, config.trainer.balance_batch
        for role, group_plan in placed.items():
            if role != "data":
                make = self._factory(group_plan)
                group = WorkerGroup(self.backend, make, group_plan.pool, role=role, balance=balance)
                groups |= dict.fromkeys(group_plan.parts, group)
        streams = "reward" in groups and hasattr(groups["rollout"], "stream_sequences")
        return Roles(
            data=data,
            actor=groups["actor"],
            rollout=groups["rollout"],
            references={role: group for role, group in groups.items() if kind_of(role) == "ref"},
            critic=groups.get("critic"),
            reward_models={role: group for role, group in groups.items() if kind_of(role) == "reward_model"},
            reward=groups.get("reward"),
            batch=groups["batch"],
            scoring=scoring,
            scores_parts=streams and not (reward is not None and reward.batched),
            resets_reference="ref" in groups and policy.ref.reset_interval > 0,
            rollout_shares=groups["rollout"].world_size // policy.rollout.split,
        )

    def _factory(self, group_plan: GroupPlan) -> WorkerFactory:
        """Return the function that makes the workers of a group."""
        prepared, plan, run = self.prepared, self.plan, self.run
        config, tokenizer = prepared.config, prepared.tokenizer
        policy = config.actor_rollout_ref
        kind, worker = kind_of(group_plan.role), group_plan.worker
        one_of_several = group_plan.role != kind
        device, limit_s = config.trainer.device, config.trainer.timeouts.collective
        engine = {"device": device, "run": run, "collective_timeout_s": limit_s}
        if kind == "reward":
            return partial(worker, tokenizer, prepared.reward, config.reward, run)
        if kind == "reward_model":
            named = {"role": group_plan.role} if one_of_several else {}
            return partial(worker, config.reward_model, tokenizer=tokenizer, **engine, **named)
        if kind == "batch":
            stops = () if policy.rollout.ignore_eos else prepared.stops
            special = SpecialTokens.of(tokenizer, stops)
            several = {"references": policy.ref.columns} if policy.ref.models else {}
            rest = {"special": special, "certain": certain(policy.rollout), **several}
            return partial(worker, config.algorithm, run, policy.actor, **rest)
        if kind == "critic":
            return partial(
                worker,
                config.critic,
                norm_length=policy.actor.loss_scale_factor,
                total_steps=plan.total_steps,
                updates_per_step=updates_per_step(plan.batch_samples, plan.critic),
                seed=config.trainer.seed,
                **engine,
            )
        named = {"reference": group_plan.role} if one_of_several else {}
        return partial(
            worker,
            config,
            parts=frozenset(map(kind_of, group_plan.parts)),
            tokenizer=tokenizer,
            total_steps=max(1, plan.total_steps - config.trainer.critic_warmup),
            updates_per_step=updates_per_step(plan.batch_samples, plan.actor),
            recompute_old=plan.recompute_old,
            old_outputs=plan.old_outputs,
            device=device,
            run=run,
            **named,
        )

    def move(self, roles: Roles, placement: Placement) -> Roles:
        """Restart all roles except data in other processes, with the weights that the run started with.

        Args:
            roles: The groups to stop.
            placement: The new processes of each role.

        Returns:
            The new groups. Load a checkpoint to restore the trained weights.

        Raises:
            ConfigError: `plan_groups` refuses the placement, or the processes are not available.
        """
        placed = plan_groups(placement, self.prepared.role_plan)
        for group in roles.groups:
            if group is not roles.data:
                group.shutdown()
        pools = pools_of(placed)
        self.backend.release([name for name, pool in self._pools.items() if pools.get(name) != pool])
        self.backend.reserve(list(pools.values()))
        return self.launch(placed, roles.data, roles.scoring)
