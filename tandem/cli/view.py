"""`tandem view [RUN …] [--port N] [--no-browser]`"""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.typed import run_typed
from tandem.errors import ConfigError
from tandem.observability.terminal import say
from tandem.viewer.api import Api
from tandem.viewer.server import Server
from tandem.viewer.shelf import Shelf


def view(arguments: list[str]) -> int:
    return run_typed("view", _view, arguments)


def _view(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="run folders, or folders under which runs are sought; runs/")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="of the page; 0: a free one")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="only print the address")] = False,
) -> None:
    """Shows runs in a browser, alive or ended: curves, samples token by token, time, and what warns of
    trouble. The page is on this machine alone, loads nothing from elsewhere and sends nothing."""
    with Shelf(runs or [Path("runs")]) as shelf:
        try:
            server = Server(Api(shelf), port)
        except OSError as error:
            raise ConfigError(
                "cannot be listened on", field="--port", got=f"{port} ({error})", remedy="name another port"
            ) from error
        with server:
            say(f"{server.url}\n{len(shelf.runs())} runs; Ctrl-C ends")
            if not no_browser:
                webbrowser.open(server.url)
            server.serve_forever()
