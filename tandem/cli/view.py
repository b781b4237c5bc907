"""The command `tandem view`."""

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
    """Show runs in a browser, during and after training.

    The page shows curves, samples token by token, times, and warnings. Only
    this machine can open the page. The page sends no data to other machines and
    loads no files from them.

    Args:
        runs: run folders, or folders to search for runs; default: runs/
        port: port of the page; 0: any free port
        no_browser: only print the address, do not open a browser
    """
    folders = runs or [Path("runs")]
    with Shelf(folders) as shelf:
        try:
            server = Server(Api(shelf), port)
        except OSError as error:
            raise ConfigError(
                "this port cannot be used",
                field="--port",
                got=f"{port} ({error})",
                expected="a free port",
                remedy="choose another port, or leave out --port to use any free port",
            ) from error
        with server:
            say(f"{server.url}\nruns: {len(shelf.runs())}; press Ctrl-C to stop")
            if not shelf.runs():
                say(
                    f"no run was found below {', '.join(map(str, folders))}; the page shows runs as soon as "
                    "they start there. Start a run (such as `tandem demo`), or name a folder with runs."
                )
            if not no_browser:
                webbrowser.open(server.url)
            server.serve_forever()
