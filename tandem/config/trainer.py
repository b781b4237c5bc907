"""`trainer`: the run, its folder, its devices and its rhythm."""

from __future__ import annotations

from typing import Annotated, Literal

from tandem.config import tables
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
    backend: Literal["auto", "local"] = key(
        "auto", "how workers run; local: in this process; auto: local for one process", read_by="config"
    )
    seed: int = key(0, "seed of all random numbers", read_by="trainer", ge=0)
    test_freq: int = key(
        -1, "validate every so many steps and at the end; -1: never", read_by="trainer", ge=-1
    )
    save_freq: int = key(-1, "save every so many steps and at the end; -1: never", read_by="trainer", ge=-1)
    max_ckpt_to_keep: int | None = key(
        None, "newest checkpoints that are kept; null: all", read_by="checkpoint", ge=1
    )
    resume_mode: Annotated[str, OneOf(("auto", "disable", "resume_path"), {"path": "resume_path"})] = key(
        "auto",
        "auto: go on from the run folder's newest whole checkpoint; resume_path: from resume_from_path",
        read_by="trainer.session",
    )
    resume_from_path: LocalPath | None = key(
        None, "checkpoint folder for resume_mode=resume_path", read_by="trainer.session"
    )

    @property
    def world_size(self) -> int:
        """Devices of the run, all machines together."""
        return self.n_gpus_per_node * self.nnodes


class TrainerConfig(RunConfig):
    """A reinforcement learning run."""

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
