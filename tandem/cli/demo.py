"""The command `tandem demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.signals import import_module
from tandem.cli.typed import command
from tandem.demo.gym import ARITHMETIC, GYMS
from tandem.observability.terminal import say


@command
def demo(  # noqa: D417 - the help of `task` is above, as it lists the tasks
    task: Annotated[
        str,
        typer.Argument(
            help=f"the task to learn: {ARITHMETIC}, or a task of reasoning-gym: {', '.join(GYMS)}"
        ),
    ] = ARITHMETIC,
    overrides: Annotated[list[str] | None, typer.Argument()] = None,
    algo: str = "grpo",
    out: Path | None = None,
    seed: int = 0,
    control: str = "none",
    ranks: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Train a small policy by reinforcement learning, on this machine, in a few minutes.

    Args:
        overrides: more settings for the training, as key=value
        algo: grpo, or ppo (which has a critic)
        out: folder for everything that the demo writes; default: runs/demo or runs/demo_TASK
        seed: the same seed gives the same curve
        control: none, or a run in which nothing can be learned: zero-lr or shuffled-rewards
        ranks: number of processes that share the work; more than one needs Ray
    """
    words = overrides or []
    if "=" in task:
        task, words = ARITHMETIC, [task, *words]
    run_demo = import_module("tandem.demo.program").run_demo
    run_demo(
        out or Path("runs") / ("demo" if task == ARITHMETIC else f"demo_{task}"),
        task=task,
        algorithm=algo,
        seed=seed,
        control=control,
        ranks=ranks,
        overrides=words,
        say=say,
    )
