"""`tandem view [RUN …] [--port N] [--no-browser]`"""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.typed import command
from tandem.errors import ConfigError
from tandem.observability.terminal import say
from tandem.viewer.api import Api
from tandem.viewer.server import Server
from tandem.viewer.shelf import Shelf


@command
def view(
    runs: Annotated[list[Path] | None, typer.Argument()] = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser")] = False,
) -> None:
    """Shows runs in a browser, alive or ended: curves, samples token by token, time, and what warns of
    trouble. The page is on this machine alone, loads nothing from elsewhere and sends nothing.

    Args:
        runs: run folders, or folders under which runs are sought; runs/
        port: of the page; 0: a free one
        no_browser: only print the address
    """
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
