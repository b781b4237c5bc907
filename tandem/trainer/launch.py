"""Starts and moves the worker groups of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
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
        cast: who plays which role, wherever it moves.
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

    def reserve(self, placed: Mapping[str, Tenant]) -> None:
        """Makes sure of the processes that the groups of a run have.

        Raises:
            ConfigError: they cannot be had.
        """
        pools = {pool.name: pool for pool in (CONTROLLER_POOL, *(tenant.pool for tenant in placed.values()))}
        gone = [name for name, pool in self._pools.items() if pools.get(name) != pool]
        self.backend.release(gone)
        self.backend.reserve(list(pools.values()))
        self._pools = pools

    def launch_data(self, tenant: Tenant) -> WorkerGroup:
        """The group that reads the data.

        Raises:
            DataError: anything wrong with them.
        """
        return self._group(tenant, partial(tenant.worker, self.config.data, self.tokenizer, self.run))

    def launch(self, placed: Mapping[str, Tenant], plan: Plan, data: WorkerGroup) -> Roles:
        """All other groups, in processes that were reserved.

        Raises:
            TandemError: a model cannot be loaded, or anything else a worker refuses.
        """
        rollout, ref = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.ref
        groups = {"data": data}
        for role, tenant in placed.items():
            if role != "data":
                groups |= dict.fromkeys(tenant.parts, self._group(tenant, self._factory(tenant, plan)))
        return Roles(
            data=data,
            actor=groups["actor"],
            rollout=groups["rollout"],
            reference=groups.get("ref"),
            critic=groups.get("critic"),
            reward_model=groups.get("reward_model"),
            reward=groups.get("reward"),
            batch=groups["batch"],
            scores_parts=self._scores_parts(groups),
            resets_reference="ref" in groups and ref.reset_interval > 0,
            rollout_shares=groups["rollout"].world_size // rollout.tensor_model_parallel_size,
        )

    def move(self, roles: Roles, placement: Placement, plan: Plan) -> Roles:
        """The same roles in other processes, with nothing learnt yet; only the data stay where they are.

        Raises:
            ConfigError: as `tenants` and `reserve`.
        """
        placed = tenants(placement, self.cast)
        for group in roles.groups:
            if group is not roles.data:
                group.shutdown()
        self.reserve(placed)
        return self.launch(placed, plan, roles.data)

    def _group(self, tenant: Tenant, factory: WorkerFactory) -> WorkerGroup:
        balance = self.config.trainer.balance_batch
        return WorkerGroup(self.backend, factory, tenant.pool, role=tenant.role, balance=balance)

    def _scores_parts(self, groups: dict[str, WorkerGroup]) -> bool:
        whole = self.reward is not None and self.reward.batched
        return "reward" in groups and not whole and hasattr(groups["rollout"], "stream_sequences")

    def _factory(self, tenant: Tenant, plan: Plan) -> WorkerFactory:
        config, trainer = self.config, self.config.trainer
        if tenant.role == "batch":
            return partial(tenant.worker, config.algorithm, self.run, config.actor_rollout_ref.actor)
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
                seed=trainer.seed,
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
