"""`trainer`: the run, its folder, its devices and its rhythm."""

from __future__ import annotations

from typing import Annotated, Literal

from tandem.config import tables
from tandem.config.cluster import POOL, ROLES, ByName, ClusterConfig, Counts, TimeoutsConfig, place
from tandem.config.section import AsTuple, LocalPath, OneOf, Section, key

SINKS = "observability.sinks"
Logger = Annotated[str, OneOf(tables.LOGGERS)]


class RunConfig(Section):
    """What every kind of run has."""

    project_name: str = key("tandem", "name of the project, for the loggers", read_by=SINKS)
    experiment_name: str = key("default", "name of the run, for the loggers", read_by=SINKS)
    default_local_dir: LocalPath = key(
        "runs/${trainer.project_name}/${trainer.experiment_name}", "the run folder", read_by="trainer.session"
    )
    logger: Annotated[tuple[Logger, ...], AsTuple] = key(
        ("console",), "where metrics go besides metrics.jsonl, one or a list", read_by=SINKS
    )
    total_epochs: int = key(30, "passes over the training data", read_by="trainer", ge=1)
    total_training_steps: int | None = key(
        None, "training steps; null: as many as total_epochs give", read_by="trainer", ge=1
    )
    n_gpus_per_node: int = key(1, "devices per machine (processes, on CPU)", read_by="config", ge=1)
    nnodes: int = key(1, "machines", read_by="config", ge=1)
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "where the models live; auto: CUDA if there is one", read_by="trainer"
    )
    seed: int = key(0, "seed of all random numbers", read_by="trainer", ge=0)
    test_freq: int = key(
        -1, "validate every so many steps and at the end; -1: never", read_by="trainer", ge=-1
    )
    save_freq: int = key(-1, "save every so many steps and at the end; -1: never", read_by="trainer", ge=-1)
    max_ckpt_to_keep: int | None = key(
        None, "newest checkpoints that are kept; null: all", read_by="checkpoint", ge=1
    )
    keep_best: str | None = key(
        None,
        "metric, such as val/accuracy, by which the best checkpoint is kept beside the newest; one of a step "
        "without it does not count; null: none",
        read_by="trainer.saving",
    )
    keep_best_mode: Literal["max", "min"] = key(
        "max", "whether the most or the least of keep_best is the best", read_by="trainer.saving"
    )
    async_save: bool = key(
        False,
        "write checkpoints while training goes on; each process needs memory on the host for a copy of its "
        "share of weights and optimizer",
        read_by="trainer.saving",
    )
    resume_mode: Annotated[str, OneOf(("auto", "disable", "resume_path"), {"path": "resume_path"})] = key(
        "auto",
        "auto: go on from the run folder's newest whole checkpoint; resume_path: from resume_from_path",
        read_by="trainer.session",
    )
    resume_from_path: LocalPath | None = key(
        None, "checkpoint folder for resume_mode=resume_path", read_by="trainer.session"
    )
    backend: Literal["auto", "local", "ray"] = key(
        "auto",
        "how workers run; local: in this process; ray: in processes of their own; auto: local for one "
        "process, else ray",
        read_by="trainer.launch",
    )
    balance_batch: bool = key(
        True, "share samples out so that all devices get as many tokens", read_by="trainer.launch"
    )
    max_restarts: int = key(
        0,
        "how often a run goes on by itself, from its newest checkpoint, after a worker failed",
        read_by="trainer.run",
        ge=0,
    )
    timeouts: TimeoutsConfig = TimeoutsConfig()
    cluster: ClusterConfig = ClusterConfig()

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


class TrainerConfig(RunConfig):
    """A reinforcement learning run."""

    resource_pools: Annotated[dict[str, Counts], ByName] = key(
        {},
        "pools of processes, each with a device unless only reward functions are there: {name: [processes on "
        "each of its nodes]}; empty: one pool, of n_gpus_per_node processes on each of nnodes nodes",
        read_by="trainer.placing",
    )
    placement: Annotated[dict[str, str], ByName] = key(
        {},
        "the pool of a role: {role: name}, actor and rollout apart or as actor_rollout; unplaced, they have "
        "the first pool, reward functions a CPU process of their own, and ref, critic and reward_model are "
        "with the actor",
        read_by="trainer.placing",
    )
    worker_classes: Annotated[dict[str, str], ByName] = key(
        {},
        "workers of your own: {role: file.py:Class or package.module:Class}; roles as in placement, and "
        "batch, data",
        read_by="trainer.launch",
    )
    critic_warmup: int = key(
        0, "first training steps in which only the critic learns", read_by="trainer.ppo", ge=0
    )
    val_before_train: bool = key(True, "validate before the first step", read_by="trainer.ppo")
    samples_freq: int = key(
        1,
        "keep the samples of every so many steps in the run folder; -1: of none",
        read_by="trainer.session",
        ge=-1,
    )
    val_only: bool = key(False, "validate and stop", read_by="trainer.ppo")

    @property
    def pools(self) -> dict[str, tuple[int, ...]]:
        """Processes on each node, by pool; at least one pool."""
        return dict(self.resource_pools) or super().pools

    def placed(self, role: str) -> str | None:
        """The name of a role's pool; None: reward functions in a CPU process of their own.

        Args:
            role: one of `tandem.config.cluster.PLACED_ROLES`.
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
        on_devices = {self.placed(role) for role in ROLES if role != "reward"}
        without = {self.placed("reward")} - on_devices
        return sum(sum(counts) for name, counts in self.pools.items() if name not in without)
