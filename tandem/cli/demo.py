"""`tandem demo`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.signals import import_module
from tandem.cli.typed import run_typed
from tandem.demo.gym import ARITHMETIC, GYMS
from tandem.observability.terminal import say


def demo(arguments: list[str]) -> int:
    return run_typed("demo", _demo, arguments)


def _demo(
    task: Annotated[
        str, typer.Argument(help=f"{ARITHMETIC}, or of reasoning-gym: {', '.join(GYMS)}")
    ] = ARITHMETIC,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="further key=value words for the training")
    ] = None,
    algo: Annotated[str, typer.Option(help="grpo, or ppo with a critic")] = "grpo",
    out: Annotated[
        Path | None, typer.Option(help="where everything goes: runs/demo, or runs/demo_TASK")
    ] = None,
    seed: Annotated[int, typer.Option(help="the same seed gives the same curve")] = 0,
    control: Annotated[
        str, typer.Option(help="none; zero-lr or shuffled-rewards: runs in which nothing can be learnt")
    ] = "none",
    ranks: Annotated[int, typer.Option(min=1, help="processes that share the work, by way of Ray")] = 1,
) -> None:
    """A policy learns a task by reinforcement, on this machine, in a few minutes."""
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
