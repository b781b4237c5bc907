"""`tandem node` as a separate process."""

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Run the command line. The first word gives the program `ray`: `ray` itself, `none`, or a stand-in.
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
    """Return the command line of one node, with its environment in front.

    The node must be a separate process, because it ends all descendants of its process.
    """
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
