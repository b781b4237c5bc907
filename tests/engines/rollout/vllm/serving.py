"""vLLM's API server over a folder, started as users start it."""

import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tandem.engines.rollout.http.process import ServerProcess
from tests.engines.rollout.case import request, wait_for

EAGER = ("--enforce-eager", "--no-enable-chunked-prefill", "--dtype", "float32")
ONE = ("--distributed-executor-backend", "uni")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving(folder: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[str]:
    """Yield the address of a server that runs as long as the block, by default in one process."""
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *EAGER]
    command += ["--host", "127.0.0.1", "--port", port, *(ONE if environment is None else ()), *options]
    environment = dict(environment or {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"})
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = ServerProcess(
        "a server", command, url, folder / "server.log", environment=environment, start_timeout_s=600.0
    )
    try:
        yield url
    finally:
        process.close()


def running(url: str) -> float:
    """Return the number of sequences that the server reports."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as said:
        lines = said.read().decode().splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def check_abort_ends_on_the_server(engine: Any) -> None:
    url, long = engine.server.url, request("long", prompt=np.arange(5), max_tokens=90)
    engine.submit([long])
    until = time.monotonic() + 30
    while not running(url) and time.monotonic() < until:
        engine.poll(0.0)
    [partial] = engine.abort([long.id], keep_partial=True)
    assert len(partial.token_ids) < 90
    wait_for(lambda: not running(url), 30)
    assert running(url) == 0
