"""Starts and moves the worker groups of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module

from transformers import PreTrainedTokenizerBase

from tandem.config.root import TrainConfig
from tandem.config.trainer import RunConfig
from tandem.errors import ConfigError, TandemError, WorkerFailure
from tandem.observability.run import RunFolder
from tandem.rewards import Reward
from tandem.runtime import Backend, LocalBackend, Placement, ResourcePool, WorkerGroup
from tandem.runtime.worker import WorkerFactory
from tandem.trainer.placing import CONTROLLER_POOL, Cast, Tenant, tenants
from tandem.trainer.roles import Roles
from tandem.trainer.steps import Plan, updates_per_step
from tandem.workers.batch import BatchWorker
from tandem.workers.data import DataWorker

RAY = "tandem.runtime.ray_backend:RayBackend"


def make_backend(trainer: RunConfig, run: RunFolder, say: Callable[[str], None]) -> Backend:
    """The backend that the config asks for.

    Raises:
        ConfigError: it is not installed, or there is no cluster where one is named.
    """
    if trainer.resolved_backend == "local":
        return LocalBackend()
    make = ray_backend(asked=trainer.backend)
    cluster, timeouts = trainer.cluster, trainer.timeouts
    on_sigterm = signal.getsignal(signal.SIGTERM)
    backend = make(
        trainer.experiment_name,
        run.logs,
        device=trainer.device,
        address=cluster.address,
        namespace=cluster.namespace,
        interface=cluster.interface,
        master_port=cluster.master_port,
        object_store_gb=cluster.object_store_gb,
        temp_dir=cluster.temp_dir,
        start_s=timeouts.start,
        call_s=timeouts.call,
        answer_s=timeouts.answer,
        collective_s=timeouts.collective,
        resources_s=timeouts.resources,
        stop_s=timeouts.stop,
        say=say,
    )
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own, which exits at once, in its place
    return backend


@contextmanager
def plain_errors() -> Iterator[None]:
    """An error that the user can act on is raised as it is, not as the failure of the worker that met it."""
    try:
        yield
    except WorkerFailure as failure:
        if isinstance(failure.__cause__, TandemError):
            raise failure.__cause__ from None
        raise


def ray_backend(*, asked: str) -> Callable[..., Backend]:
    """Makes the backend on Ray.

    Args:
        asked: the `trainer.backend` of the config, for the message.

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
            remedy="pip install 'tandem[ray]', or ask for one process",
        ) from error
    return make


class Launcher:
    """The worker groups of a run.

    Args:
        config: the resolved config.
        cast: the roles that the run has, and who plays them.
        backend: where workers run.
        run: the run folder.
        tokenizer: the policy's.
        reward: the user's own reward function; None takes each data source's.
    """

    def __init__(
        self,
        config: TrainConfig,
        cast: Cast,
        backend: Backend,
        run: RunFolder,
        tokenizer: PreTrainedTokenizerBase,
        reward: Reward | None,
    ) -> None:
        self.config = config
        self.cast = cast
        self.backend = backend
        self.run = run
        self.tokenizer = tokenizer
        self.reward = reward
        self._pools: dict[str, ResourcePool] = {}

    def reserve(self, placement: Placement) -> None:
        """Makes sure of the processes that a placement asks for.

        Raises:
            ConfigError: they cannot be had, or a class does not fit its role.
        """
        used = [tenant.pool for tenant in tenants(placement, self.cast).values()]
        pools = {pool.name: pool for pool in (CONTROLLER_POOL, *used)}
        gone = [name for name, pool in self._pools.items() if pools.get(name) != pool]
        self.backend.release(gone)
        self.backend.reserve(list(pools.values()))
        self._pools = pools

    def launch_data(self) -> WorkerGroup:
        """The group that reads the data.

        Raises:
            DataError: anything wrong with them.
        """
        worker = self.cast.classes.get("data", DataWorker)
        return self._group(
            partial(worker, self.config.data, self.tokenizer, self.run), CONTROLLER_POOL, "data"
        )

    def launch(self, placement: Placement, plan: Plan, data: WorkerGroup) -> Roles:
        """All other groups, in processes that were reserved.

        Raises:
            TandemError: a model cannot be loaded, or anything else a worker refuses.
        """
        batch, policy = self.cast.classes.get("batch", BatchWorker), self.config.actor_rollout_ref
        placed = tenants(placement, self.cast)
        groups = {
            role: self._group(self._factory(tenant, plan), tenant.pool, role)
            for role, tenant in placed.items()
        }
        of_part = {part: groups[role] for role, tenant in placed.items() for part in tenant.parts}
        return Roles(
            data=data,
            actor=of_part["actor"],
            rollout=of_part["rollout"],
            reference=of_part.get("ref"),
            critic=of_part.get("critic"),
            reward_model=of_part.get("reward_model"),
            reward=of_part.get("reward"),
            batch=self._group(
                partial(batch, self.config.algorithm, self.run, policy.actor), CONTROLLER_POOL, "batch"
            ),
            scores_parts=self._scores_parts(of_part),
            resets_reference="ref" in of_part and policy.ref.reset_interval > 0,
            rollout_shares=of_part["rollout"].world_size // policy.rollout.tensor_model_parallel_size,
        )

    def move(self, roles: Roles, placement: Placement, plan: Plan) -> Roles:
        """The same roles in other processes, with nothing learnt yet; only the data stay where they are.

        Raises:
            ConfigError: as `reserve`.
        """
        for group in roles.groups:
            if group is not roles.data:
                group.shutdown()
        self.reserve(placement)
        return self.launch(placement, plan, roles.data)

    def _group(self, factory: WorkerFactory, pool: ResourcePool, role: str) -> WorkerGroup:
        return WorkerGroup(self.backend, factory, pool, role=role, balance=self.config.trainer.balance_batch)

    def _scores_parts(self, groups: dict[str, WorkerGroup]) -> bool:
        whole = self.reward is not None and self.reward.batched
        return "reward" in groups and not whole and hasattr(groups["rollout"], "stream_sequences")

    def _factory(self, tenant: Tenant, plan: Plan) -> WorkerFactory:
        config, trainer = self.config, self.config.trainer
        if tenant.role == "reward":
            return partial(tenant.worker, self.tokenizer, self.reward, self.run)
        engine = {
            "device": trainer.device,
            "run": self.run,
            "collective_timeout_s": trainer.timeouts.collective,
        }
        if tenant.role == "reward_model":
            return partial(tenant.worker, config.reward_model, tokenizer=self.tokenizer, **engine)
        if tenant.role == "critic":
            return partial(
                tenant.worker,
                config.critic,
                norm_length=config.actor_rollout_ref.actor.loss_scale_factor,
                total_steps=plan.total_steps,
                updates_per_step=updates_per_step(plan.batch_samples, plan.critic),
                **engine,
            )
        return partial(
            tenant.worker,
            config,
            parts=tenant.parts,
            tokenizer=self.tokenizer,
            total_steps=max(1, plan.total_steps - trainer.critic_warmup),
            updates_per_step=updates_per_step(plan.batch_samples, plan.actor),
            recompute_old=plan.recompute_old,
            old_outputs=plan.old_outputs,
            device=trainer.device,
            run=self.run,
        )
