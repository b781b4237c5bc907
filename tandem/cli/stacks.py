"""The command `tandem stacks`."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.cli.signals import import_module
from tandem.cli.typed import command
from tandem.errors import DataError
from tandem.observability.stacks import ask_stacks
from tandem.observability.terminal import say
from tandem.texts import parse_json


@command
def stacks(run: Path) -> None:
    """Print the Python stacks of all processes of a run, without disturbing the run.

    Args:
        run: the run folder
    """
    logs = run / "log"
    _show(*ask_stacks(logs))
    file = logs / "processes.json"
    if file.is_file():
        try:
            processes = parse_json(file.read_text(encoding="utf-8"))
            os.environ.update(
                processes["environment"]
            )  # before Ray is imported, because it reads them only then
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                "this file does not list the processes of a run", field=str(file), got=error
            ) from error
        for name, text in import_module("tandem.runtime.ray_backend").stacks(processes):
            _show(name, text)


def _show(name: str, text: str) -> None:
    say(f"── {name}\n{text.rstrip()}\n")
