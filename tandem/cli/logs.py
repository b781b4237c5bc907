"""`tandem logs RUN [NAME] [-f]`"""

from __future__ import annotations

import time
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.typed import run_typed
from tandem.errors import ConfigError
from tandem.observability.inside import opened
from tandem.observability.terminal import say

POLL_S = 0.2
_PIECE = 1 << 20
"""Characters that are read at a time."""


def logs(arguments: list[str]) -> int:
    return run_typed("logs", _logs, arguments)


def _logs(
    run: Annotated[Path, typer.Argument(help="the run folder")],
    name: Annotated[
        str, typer.Argument(help="run, or POOL_RANK such as global_pool_1; none lists them")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on printing until Ctrl-C")] = False,
) -> None:
    """Prints what the run said, or what one of its processes printed."""
    found = {path.stem: path for path in sorted((run / "log").glob("*.log"))}
    if not found:
        raise ConfigError("no logs there", field=str(run / "log"), remedy="name a run folder")
    if name and name not in found:
        raise ConfigError("no such log", field=str(run), got=name, expected=f"one of {', '.join(found)}")
    if name:
        _print(found[name], run, follow=follow)
    else:
        for log, path in found.items():
            say(f"{log:<24} {path.stat().st_size:>10,} bytes")


def _print(path: Path, run: Path, *, follow: bool) -> None:
    with TextIOWrapper(opened(path, run), encoding="utf-8", errors="replace") as file:
        while (text := file.read(_PIECE)) or follow:
            say(text, end="")
            if not text:
                time.sleep(POLL_S)
