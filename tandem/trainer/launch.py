"""Starts and moves the worker groups of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.config.root import TrainConfig
from tandem.config.trainer import RunConfig
from tandem.errors import ConfigError, TandemError, WorkerFailure
from tandem.observability.run import RunFolder
from tandem.rewards import Scorer
from tandem.runtime import Backend, LocalBackend, Placement, ResourcePool, WorkerGroup
from tandem.runtime.worker import WorkerFactory
from tandem.trainer.placing import Cast, Tenant, kind_of, pools_of, tenants
from tandem.trainer.roles import Roles
from tandem.trainer.scoring import Scoring
from tandem.trainer.steps import Plan, updates_per_step
from tandem.workers.integrity import SpecialTokens, certain

RAY = "tandem.runtime.ray_backend:RayBackend"


def make_backend(trainer: RunConfig, name: str, run: RunFolder, say: Callable[[str], None]) -> Backend:
    """The backend that the config asks for.

    Args:
        name: of the run, which Ray shows and files hold.

    Raises:
        ConfigError: it is not installed, or there is no cluster where one is named.
    """
    if trainer.resolved_backend == "local":
        return LocalBackend()
    make = ray_backend(asked=trainer.backend)
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


Recipe = Callable[[Tenant], WorkerFactory]
"""Makes the factory of a group's workers."""


def recipes(
    config: TrainConfig,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    reward: Scorer | None,
    run: RunFolder,
    stops: tuple[int, ...],
) -> dict[str, Recipe]:
    """What the workers of each role are made with, besides those of the data.

    Args:
        tokenizer: the policy's.
        reward: the user's own; None takes each data source's.
        run: the run folder.
        stops: the tokens that end a response.
    """
    trainer, actor = config.trainer, config.actor_rollout_ref.actor
    engine = {"device": trainer.device, "run": run, "collective_timeout_s": trainer.timeouts.collective}
    policy = partial(
        _policy,
        config,
        tokenizer=tokenizer,
        total_steps=max(1, plan.total_steps - plan.critic_warmup),
        updates_per_step=updates_per_step(plan.batch_samples, plan.actor),
        recompute_old=plan.recompute_old,
        old_outputs=plan.old_outputs,
        device=trainer.device,
        run=run,
    )
    critic = {
        "norm_length": actor.loss_scale_factor,
        "total_steps": plan.total_steps,
        "updates_per_step": updates_per_step(plan.batch_samples, plan.critic),
        "seed": trainer.seed,
        **engine,
    }
    scorer = {"tokenizer": tokenizer, **engine}
    ignored = config.actor_rollout_ref.rollout.ignore_eos
    batch: dict[str, Any] = {
        "special": SpecialTokens.of(tokenizer, () if ignored else stops),
        "certain": certain(config.actor_rollout_ref.rollout),
    }
    ref = config.actor_rollout_ref.ref
    if ref.models:
        batch["references"] = ref.columns
    return {
        **dict.fromkeys(("actor", "rollout", "ref"), policy),
        "batch": lambda tenant: partial(tenant.worker, config.algorithm, run, actor, **batch),
        "critic": lambda tenant: partial(tenant.worker, config.critic, **critic),
        "reward": lambda tenant: partial(tenant.worker, tokenizer, reward, config.reward, run),
        "reward_model": lambda tenant: partial(
            tenant.worker, config.reward_model, **scorer, **_named("role", tenant.role)
        ),
    }


def _policy(config: TrainConfig, tenant: Tenant, **options: Any) -> WorkerFactory:
    parts = frozenset(map(kind_of, tenant.parts))
    return partial(tenant.worker, config, parts=parts, **options, **_named("reference", tenant.role))


def _named(argument: str, role: str) -> dict[str, str]:
    """The argument that tells a worker which of several models of its kind it has."""
    return {} if role == kind_of(role) else {argument: role}


def _of_kind(groups: Mapping[str, WorkerGroup], kind: str) -> dict[str, WorkerGroup]:
    return {role: group for role, group in groups.items() if kind_of(role) == kind}


class Launcher:
    """The worker groups of a run.

    Args:
        cast: who plays which role, wherever it moves.
        plan: of the run.
        recipes: of the workers, see `recipes`.
        backend: where workers run.
        balance: whether the rows of a batch are shared out by their lengths.
        scoring: makes the reward of the scores.
        scores_parts: whether reward functions may score samples before all have finished.
    """

    def __init__(
        self,
        cast: Cast,
        plan: Plan,
        recipes: Mapping[str, Recipe],
        backend: Backend,
        *,
        balance: bool,
        scoring: Scoring,
        scores_parts: bool,
    ) -> None:
        self.backend = backend
        self._cast = cast
        self._plan = plan
        self._recipes = recipes
        self._balance = balance
        self._scoring = scoring
        self._scores_parts = scores_parts
        self._pools: dict[str, ResourcePool] = {}

    def launch(self, placed: Mapping[str, Tenant], data: WorkerGroup) -> Roles:
        """All groups besides the data's, in processes that were reserved.

        Raises:
            TandemError: a model cannot be loaded, or anything else a worker refuses.
        """
        self._pools = pools_of(placed)
        groups = {"data": data}
        for role, tenant in placed.items():
            if role != "data":
                make = self._recipes[kind_of(role)](tenant)
                group = WorkerGroup(self.backend, make, tenant.pool, role=role, balance=self._balance)
                groups |= dict.fromkeys(tenant.parts, group)
        streams = "reward" in groups and hasattr(groups["rollout"], "stream_sequences")
        return Roles(
            data=data,
            actor=groups["actor"],
            rollout=groups["rollout"],
            references=_of_kind(groups, "ref"),
            critic=groups.get("critic"),
            reward_models=_of_kind(groups, "reward_model"),
            reward=groups.get("reward"),
            batch=groups["batch"],
            scoring=self._scoring,
            scores_parts=self._scores_parts and streams,
            resets_reference="ref" in groups and self._plan.reset_interval > 0,
            rollout_shares=groups["rollout"].world_size // self._plan.rollout_split,
        )

    def move(self, roles: Roles, placement: Placement) -> Roles:
        """The same roles in other processes, with nothing learnt yet; only the data stay where they are.

        Raises:
            ConfigError: as `tenants`; or the processes cannot be had.
        """
        placed = tenants(placement, self._cast)
        for group in roles.groups:
            if group is not roles.data:
                group.shutdown()
        pools = pools_of(placed)
        self.backend.release([name for name, pool in self._pools.items() if pools.get(name) != pool])
        self.backend.reserve(list(pools.values()))
        return self.launch(placed, roles.data)
