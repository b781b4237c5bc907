"""`tandem stacks RUN`"""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from tandem.observability.stacks import ask_stacks


def stacks(arguments: list[str]) -> int:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_stacks)
    app(args=arguments, prog_name="tandem stacks", standalone_mode=False)
    return 0


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
    print(f"── {name}\n{text.rstrip()}\n", flush=True)
