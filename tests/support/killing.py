"""Tandem commands in separate processes that are killed half way."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tandem.observability.files import whole_lines
from tests.support.warm import WarmProcess

LIMIT_S = 120.0


def kill_half_way(words: Sequence[str], journal: Path, pieces: int) -> int:
    """Kill `tandem` once its journal has more than `pieces` items; return how many items it has then."""
    process = WarmProcess(
        [sys.executable, "-m", "tandem", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + LIMIT_S
    try:
        while not journal.exists() or len(whole_lines(journal)) <= pieces:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.kill()
        process.communicate(timeout=60)
    return len(whole_lines(journal)) - 1
