"""vLLM's API server over a folder, started as users start it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.engines.rollout.vllm.process import VLLMProcess

ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill", "--distributed-executor-backend", "uni")


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """Yield the address of a server that runs as long as the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", *options, *ON_CPU]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    url = f"http://127.0.0.1:{port}"
    process = VLLMProcess(command, url, folder / "server.log", environment=environment, start_timeout_s=300.0)
    try:
        yield url
    finally:
        process.close()
