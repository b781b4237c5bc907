"""The section `trainer`: name, folder and devices of the run, and its schedule of validation and saving."""

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
    "if the run has more than one process, or trainer.backend=ray",
    notice=True,
)
_PROFILED = When(lambda own: bool(own.steps), "if {steps} is set")
Logger = Annotated[str, OneOf(tables.LOGGERS)]


_VALIDATED = Check(
    lambda own, metric: metric is not None and metric.startswith("val/") and own.test_freq < 1,
    "needs a validation metric, but the run never validates",
    remedy="set {test_freq} to a divisor of {save_freq}",
)


def _checkpoint(wrong: Callable[[Any, str | None], bool], message: str) -> Check:
    return Check(
        wrong,
        message,
        expected="a checkpoint folder, because {resume_mode}=resume_path",
        remedy="set it to a checkpoint folder, or set {resume_mode}=auto",
    )


_CHECKPOINT = (
    _checkpoint(lambda own, folder: folder is None, "missing"),
    _checkpoint(
        lambda own, folder: folder is not None and not os.path.isdir(folder), "this folder does not exist"
    ),
)


def _one_process(own: Any, name: str) -> Iterator[ConfigError]:
    processes = sum(map(sum, own.pools.values()))
    if own.backend == "local" and processes > 1:
        yield ConfigError(
            "this backend runs everything in one process",
            got=f"local, with {processes} processes",
            expected="one process in one pool",
            remedy=f"set {path(own, name)}=auto, or configure only one process",
        )


_FROM_CHECKPOINTS = Check(
    lambda own, restarts: restarts > 0 and own.save_freq < 1,
    "{}: without checkpoints, a restarted run starts over from the beginning; set {save_freq}.",
    notice=True,
)


class ProfileConfig(Section):
    """Profiles of single steps, written by torch's profiler to the folder RUN/profile.

    Attributes:
        steps: Numbers of the steps to profile. []: none.
        ranks: Ranks of each role to profile, in addition to the controller. null: all ranks.
        memory: Also record memory allocations. On CUDA this includes their history and one snapshot per
            process.
    """

    steps: Annotated[tuple[Annotated[int, Ge(1)], ...], AsTuple] = ()
    ranks: Annotated[tuple[Annotated[int, Ge(0)], ...], AsTuple] | None = key(None, when=_PROFILED)
    memory: bool = key(False, when=_PROFILED)


class RunConfig(Section):
    """The settings that RL, SFT and reward-model runs share.

    Attributes:
        project_name: Name of the project, as loggers show it.
        experiment_name: Name of the run, as loggers show it.
        default_local_dir: The run folder: metrics, samples and checkpoints are written here.
        private_folder: Create the run folder so that only you can read it (mode 0700). false: the permissions
            follow your umask.
        logger: Where metrics are sent in addition to the file metrics.jsonl: one logger, or a list.
        total_epochs: Number of passes over the training data.
        total_training_steps: Number of training steps. null: as many as total_epochs gives.
        n_gpus_per_node: Devices per machine. On CPU: processes per machine.
        nnodes: Number of machines.
        device: Where the models are placed. auto: CUDA if a CUDA device is available, otherwise CPU.
        seed: Seed of all random numbers.
        test_freq: Validate every test_freq steps, and at the end of the run. -1: never.
        save_freq: Save a checkpoint every save_freq steps, and at the end of the run. -1: only at the end. 0:
            never.
        max_ckpt_to_keep: Number of newest checkpoints to keep; older checkpoints are deleted. null: keep all.
        keep_best: Metric that decides which checkpoint is the best, such as val/accuracy. The best checkpoint
            is kept in addition to the newest checkpoints. A checkpoint is only considered if its step has
            this metric. null: no best checkpoint is kept.
        keep_best_mode: Whether the largest (max) or the smallest (min) value of keep_best is the best.
        async_save: Write checkpoints while training continues. Each process then needs host memory for a copy
            of its shards of the weights and the optimizer state.
        resume_mode: Whether to continue an earlier run. auto: continue from the newest complete checkpoint in
            the run folder, if there is one. resume_path: continue from resume_from_path. disable: start a new
            run.
        resume_from_path: The checkpoint folder to continue from, for resume_mode=resume_path.
        resume_with_changes: Also continue from a checkpoint if a key that affects training has a different
            value now. false: such a change is an error.
        backend: How workers run. local: all in this process. ray: each worker in a separate process. auto:
            local if the run has one process, otherwise ray.
        balance_batch: Distribute samples so that all devices get about the same number of tokens.
        max_restarts: How many times the run restarts by itself, from its newest checkpoint, after a worker
            has failed.
    """

    all_resumed = "reported"

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
        "max", when=When(lambda own: own.keep_best is not None, "if {keep_best} is set")
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
            "if a pool has more than one process",
            notice=True,
        ),
    )
    max_restarts: int = key(0, when=_RAY, needs=_FROM_CHECKPOINTS, ge=0)
    profile: ProfileConfig = ProfileConfig()
    timeouts: TimeoutsConfig = section(TimeoutsConfig(), when=_RAY)
    cluster: ClusterConfig = section(ClusterConfig(), when=_RAY)

    @property
    def pools(self) -> dict[str, tuple[int, ...]]:
        """A dict from pool to the number of processes on each of its nodes. There is at least one pool."""
        return {POOL: (self.n_gpus_per_node,) * self.nnodes}

    @property
    def resolved_backend(self) -> Literal["local", "ray"]:
        """The backend, with `auto` resolved."""
        if self.backend != "auto":
            return self.backend
        return "local" if sum(map(sum, self.pools.values())) == 1 else "ray"

    def steps(self, per_epoch: int) -> int:
        """Return the number of training steps of the run.

        Args:
            per_epoch: the number of steps in one epoch.
        """
        return self.total_training_steps or self.total_epochs * per_epoch


class TrainerConfig(RunConfig):
    """The settings of a reinforcement learning run.

    Attributes:
        defaults: Which defaults apply to keys that you do not set. tandem: Tandem's own. verl: verl's
            defaults, for keys that affect training or the location of files.
        resource_pools: Pools of processes: {name: [number of processes on each node]}. Each process has a
            device, except in a pool that only runs reward functions. Empty: one pool, with n_gpus_per_node
            processes on each of nnodes nodes.
        placement: The pool that each role runs on: {role: pool name}. Place actor and rollout separately, or
            together as actor_rollout. If a role has several models, place a model as ref.NAME or
            reward_model.NAME. Without an entry, actor and rollout use the first pool, the ref, critic and
            reward_model roles share the actor's pool, and reward functions run in a separate CPU process.
        worker_classes: Your own worker classes: {role: file.py:Class or package.module:Class}. The roles are
            the roles of placement, and also batch and data.
        worst_batch_first: Run the largest micro-batch of actor and critic before the first step, without
            learning from it, so that a run with too little memory fails at once. null: only on CUDA.
        critic_warmup: Number of training steps at the start in which only the critic learns.
        val_before_train: Validate before the first training step.
        samples_freq: Write a step's samples to the run folder every samples_freq steps. -1: never.
        log_val_generations: Number of responses from each validation that are sent to the loggers as text.
        on_step: Your own function, as file.py:function. The controller calls it after each step, with the
            step number and the step's metrics.
        val_only: Validate once and stop, without training.
    """

    defaults: Literal["tandem", "verl"] = "tandem"
    resource_pools: Annotated[dict[str, Counts], ByName] = key({})
    placement: Annotated[dict[str, str], ByName] = key({})
    worker_classes: Annotated[dict[str, str], ByName] = key({}, resumed="refused")
    worst_batch_first: bool | None = None
    critic_warmup: int = key(
        0,
        when=When(lambda own: root(own).needs_critic, "if algorithm.adv_estimator uses a critic"),
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
        """A dict from pool to the number of processes on each of its nodes. There is at least one pool."""
        return dict(self.resource_pools) or super().pools

    def placed(self, role: str) -> str | None:
        """Return the name of a role's pool; None for reward functions that run in a separate CPU process.

        Args:
            role: one of `tandem.config.cluster.PLACED_ROLES`, or of `TrainConfig.roles`.
        """
        return place(role, self.pools, self.placement)

    def devices_of(self, role: str) -> int:
        """Return the number of processes in the role's pool; 1 for reward functions without a pool."""
        name = self.placed(role)
        return 1 if name is None else sum(self.pools[name])

    @property
    def world_size(self) -> int:
        """The number of devices of the run, over all pools.

        Processes in a pool that only runs reward functions are not counted. `devices_of(role)` gives the
        devices of one role.
        """
        on_devices = {self.placed(role) for role in (*ROLES, *self.placement) if role != "reward"}
        without = {self.placed("reward")} - on_devices
        return sum(sum(counts) for name, counts in self.pools.items() if name not in without)
