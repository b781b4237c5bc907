"""`tandem stacks RUN`"""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.typed import run_typed
from tandem.observability.stacks import ask_stacks
from tandem.observability.terminal import say


def stacks(arguments: list[str]) -> int:
    return run_typed("stacks", _stacks, arguments)


def _stacks(run: Annotated[Path, typer.Argument(help="the run folder")]) -> None:
    """Prints the Python stacks of all processes of a run, which goes on undisturbed."""
    logs = run / "log"
    _show(*ask_stacks(logs))
    file = logs / "processes.json"
    if file.is_file():
        processes = json.loads(file.read_text())
        os.environ.update(processes["environment"])  # before Ray is imported, which reads them once
        for name, text in import_module("tandem.runtime.ray_backend").stacks(processes):
            _show(name, text)


def _show(name: str, text: str) -> None:
    say(f"── {name}\n{text.rstrip()}\n")
