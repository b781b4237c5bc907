"""`trainer`: the run, its folder, its devices and its rhythm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge

from tandem.config import tables
from tandem.config.cluster import POOL, ROLES, ByName, ClusterConfig, Counts, TimeoutsConfig, place
from tandem.config.needs import Check, own_code, validation_files
from tandem.config.section import AsTuple, LocalPath, OneOf, Section, When, beside, key, section
from tandem.config.view import path, root
from tandem.errors import ConfigError

_RAY = When(
    lambda own: own.resolved_backend == "ray",
    "with more than one process, or trainer.backend=ray",
    notice=True,
)
_PROFILED = When(lambda own: bool(own.steps), "with {steps}")
Logger = Annotated[str, OneOf(tables.LOGGERS)]


_VALIDATED = Check(
    lambda own, metric: metric is not None and metric.startswith("val/") and own.test_freq < 1,
    "judges checkpoints by a validation, and there is none",
    remedy="set {test_freq} to a divisor of {save_freq}",
)


def _checkpoint(wrong: Callable[[Any, str | None], bool], message: str) -> Check:
    return Check(
        wrong,
        message,
        expected="a checkpoint folder, for {resume_mode}=resume_path",
        remedy="name one, or set {resume_mode}=auto",
    )


_CHECKPOINT = (
    _checkpoint(lambda own, folder: folder is None, "missing"),
    _checkpoint(lambda own, folder: folder is not None and not os.path.isdir(folder), "no such folder"),
)


def _one_process(own: Any, name: str) -> Iterator[ConfigError]:
    processes = sum(map(sum, own.pools.values()))
    if own.backend == "local" and processes > 1:
        yield ConfigError(
            "runs everything in one process",
            got=f"local, with {processes} processes",
            expected="one process, of one pool",
            remedy=f"set {path(own, name)}=auto, or ask for one process",
        )


_FROM_CHECKPOINTS = Check(
    lambda own, restarts: restarts > 0 and own.save_freq < 1,
    "{}: without checkpoints a restart begins anew; set {save_freq}.",
    notice=True,
)


class ProfileConfig(Section):
    """Profiles of single steps, by torch's profiler, into RUN/profile.

    Attributes:
        steps: steps that are profiled; []: none
        ranks: ranks of each role that are profiled beside the controller; null: all
        memory: also record allocations; on CUDA with their history, a snapshot for each process
    """

    steps: Annotated[tuple[Annotated[int, Ge(1)], ...], AsTuple] = ()
    ranks: Annotated[tuple[Annotated[int, Ge(0)], ...], AsTuple] | None = key(None, when=_PROFILED)
    memory: bool = key(False, when=_PROFILED)


class RunConfig(Section):
    """What every kind of run has.

    Attributes:
        project_name: name of the project, for the loggers
        experiment_name: name of the run, for the loggers
        default_local_dir: the run folder
        private_folder: a new run folder is for its user alone (mode 0700); false: as the umask has it
        logger: where metrics go besides metrics.jsonl, one or a list
        total_epochs: passes over the training data
        total_training_steps: training steps; null: as many as total_epochs give
        n_gpus_per_node: devices per machine (processes, on CPU)
        nnodes: machines
        device: where the models live; auto: CUDA if there is one
        seed: seed of all random numbers
        test_freq: validate every so many steps and at the end; -1: never
        save_freq: save every so many steps and at the end; -1: at the end alone; 0: never
        max_ckpt_to_keep: newest checkpoints that are kept; null: all
        keep_best: metric, such as val/accuracy, by which the best checkpoint is kept beside the newest; one
            of a step without it does not count; null: none
        keep_best_mode: whether the most or the least of keep_best is the best
        async_save: write checkpoints while training goes on; each process needs memory on the host for a copy
            of its share of weights and optimizer
        resume_mode: auto: go on from the run folder's newest whole checkpoint; resume_path: from
            resume_from_path
        resume_from_path: checkpoint folder for resume_mode=resume_path
        resume_with_changes: go on from the newest checkpoint also where a key that decides what is learnt has
            another value
        backend: how workers run; local: in this process; ray: in processes of their own; auto: local for one
            process, else ray
        balance_batch: share samples out so that all devices get as many tokens
        max_restarts: how often a run goes on by itself, from its newest checkpoint, after a worker failed
    """

    all_resumed = "told"

    project_name: str = "tandem"
    experiment_name: str = "default"
    default_local_dir: LocalPath = key(
        "runs/${trainer.project_name}/${trainer.experiment_name}", resumed="silent"
    )
    private_folder: bool = True
    logger: Annotated[tuple[Logger, ...], AsTuple] = ("console",)
    total_epochs: int = key(30, ge=1)
    total_training_steps: int | None = key(None, ge=1)
    n_gpus_per_node: int = key(1, ge=1)
    nnodes: int = key(1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = key(0, ge=0, resumed="refused")
    test_freq: int = key(-1, needs=validation_files, ge=-1)
    save_freq: int = key(-1, ge=-1)
    max_ckpt_to_keep: int | None = key(None, ge=1)
    keep_best: str | None = key(None, needs=_VALIDATED)
    keep_best_mode: Literal["max", "min"] = key(
        "max", when=When(lambda own: own.keep_best is not None, "with {keep_best}")
    )
    async_save: bool = False
    resume_mode: Annotated[str, OneOf(("auto", "disable", "resume_path"), {"path": "resume_path"})] = key(
        "auto", resumed="silent"
    )
    resume_from_path: LocalPath | None = key(
        None, when=beside("resume_mode", "resume_path"), needs=_CHECKPOINT, resumed="silent"
    )
    resume_with_changes: bool = key(False, resumed="silent")
    backend: Literal["auto", "local", "ray"] = key("auto", needs=_one_process)
    balance_batch: bool = key(
        True,
        when=When(
            lambda own: any(sum(counts) > 1 for counts in own.pools.values()),
            "with a pool of more than one process",
            notice=True,
        ),
    )
    max_restarts: int = key(0, when=_RAY, needs=_FROM_CHECKPOINTS, ge=0)
    profile: ProfileConfig = ProfileConfig()
    timeouts: TimeoutsConfig = section(TimeoutsConfig(), when=_RAY)
    cluster: ClusterConfig = section(ClusterConfig(), when=_RAY)

    @property
    def pools(self) -> dict[str, tuple[int, ...]]:
        """Processes on each node, by pool; at least one pool."""
        return {POOL: (self.n_gpus_per_node,) * self.nnodes}

    @property
    def resolved_backend(self) -> Literal["local", "ray"]:
        """The backend, auto decided."""
        if self.backend != "auto":
            return self.backend
        return "local" if sum(map(sum, self.pools.values())) == 1 else "ray"

    def steps(self, per_epoch: int) -> int:
        """Training steps of the run, of `per_epoch` in an epoch."""
        return self.total_training_steps or self.total_epochs * per_epoch


class TrainerConfig(RunConfig):
    """A reinforcement learning run.

    Attributes:
        defaults: whose defaults stand in where nobody sets a key; verl: verl's, where they decide what is
            learnt or where files lie
        resource_pools: pools of processes, each with a device unless only reward functions are there: {name:
            [processes on each of its nodes]}; empty: one pool, of n_gpus_per_node processes on each of nnodes
            nodes
        placement: the pool of a role: {role: name}, actor and rollout apart or as actor_rollout; unplaced,
            they have the first pool, reward functions a CPU process of their own, and ref, critic and
            reward_model are with the actor; one of several models as ref.NAME or reward_model.NAME
        worker_classes: workers of your own: {role: file.py:Class or package.module:Class}; roles as in
            placement, and batch, data
        worst_batch_first: run the largest micro-batch of actor and critic before the first step, without
            learning from it, so that memory that does not suffice is known at once; null: on CUDA alone
        critic_warmup: first training steps in which only the critic learns
        val_before_train: validate before the first step
        samples_freq: keep the samples of every so many steps in the run folder; -1: of none
        log_val_generations: responses that the loggers get as text from each validation
        on_step: function of your own, file.py:function, that the controller calls with the number and the
            metrics of each step that is done
        val_only: validate and stop
    """

    defaults: Literal["tandem", "verl"] = "tandem"
    resource_pools: Annotated[dict[str, Counts], ByName] = key({})
    placement: Annotated[dict[str, str], ByName] = key({})
    worker_classes: Annotated[dict[str, str], ByName] = key({}, resumed="refused")
    worst_batch_first: bool | None = None
    critic_warmup: int = key(
        0,
        when=When(lambda own: root(own).needs_critic, "with an algorithm.adv_estimator that has a critic"),
        ge=0,
        resumed="refused",
    )
    val_before_train: bool = True
    samples_freq: int = key(1, ge=-1)
    log_val_generations: int = key(0, needs=validation_files, ge=0)
    on_step: str | None = key(None, needs=own_code)
    val_only: bool = key(False, needs=validation_files)

    @property
    def pools(self) -> dict[str, tuple[int, ...]]:
        """Processes on each node, by pool; at least one pool."""
        return dict(self.resource_pools) or super().pools

    def placed(self, role: str) -> str | None:
        """The name of a role's pool; None: reward functions in a CPU process of their own.

        Args:
            role: one of `tandem.config.cluster.PLACED_ROLES`, or of `TrainConfig.roles`.
        """
        return place(role, self.pools, self.placement)

    def devices_of(self, role: str) -> int:
        """Processes of the role's pool; of reward functions without a pool, 1."""
        name = self.placed(role)
        return 1 if name is None else sum(self.pools[name])

    @property
    def world_size(self) -> int:
        """Devices of the run, all pools together: of each process but those of a pool that has nothing but
        reward functions. What one role has is `devices_of(role)`."""
        on_devices = {self.placed(role) for role in (*ROLES, *self.placement) if role != "reward"}
        without = {self.placed("reward")} - on_devices
        return sum(sum(counts) for name, counts in self.pools.items() if name not in without)
