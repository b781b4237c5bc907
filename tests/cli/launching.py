"""`tandem node` as a process of its own."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Runs the command line with the first word for the program `ray`: `ray` itself, `none`, or a stand-in.
RUN_WITH = """
import sys
from tandem.cli import main, node_ray
program = sys.argv.pop(1)
if program == "none":
    node_ray.sysconfig.get_path = lambda _: "nowhere"
elif program != "ray":
    node_ray._program = lambda: program
sys.exit(main.main())
"""


def launch(ray: Path | str, rank: int | None, *words: str, **environment: str) -> list[str]:
    """The command line of one node; its environment goes before it. A process of its own, for it takes
    every process below it for its work."""
    pairs = {"PYTHONPATH": str(ROOT), **environment}
    if rank is not None:
        pairs["RANK"] = str(rank)
    settings = [f"{name}={value}" for name, value in pairs.items()]
    return ["env", *settings, sys.executable, "-c", RUN_WITH, str(ray), "node", *words]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def wait_for(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
