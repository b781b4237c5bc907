"""The command `tandem logs`."""

from __future__ import annotations

import time
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.typed import command
from tandem.errors import ConfigError
from tandem.observability.inside import opened
from tandem.observability.terminal import say

POLL_S = 0.2
_PIECE = 1 << 20
"""The number of characters to read at a time."""


@command
def logs(
    run: Path,
    name: Annotated[str, typer.Argument()] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False,
) -> None:
    """Print the log of a run, or the output of one of its processes.

    Args:
        run: the run folder
        name: run, or POOL_RANK such as global_pool_1; without a name, the logs are listed
        follow: keep printing new lines until Ctrl-C
    """
    found = {path.stem: path for path in sorted((run / "log").glob("*.log"))}
    if not found:
        raise ConfigError(
            "this folder has no logs", field=str(run / "log"), remedy="give the folder of a run"
        )
    if name and name not in found:
        raise ConfigError(
            "this run has no such log", field=str(run), got=name, expected=f"one of: {', '.join(found)}"
        )
    if not name:
        for log, path in found.items():
            say(f"{log:<24} {path.stat().st_size:>10,} bytes")
        return
    with TextIOWrapper(opened(found[name], run), encoding="utf-8", errors="replace") as file:
        while (text := file.read(_PIECE)) or follow:
            say(text, end="")
            if not text:
                time.sleep(POLL_S)
