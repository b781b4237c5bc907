import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from torch.distributed import TCPStore

from tests.support.warm import WarmProcess


def run_ranks(job: str | Path, *arguments: object, ranks: int = 2, timeout: float = 280) -> str:
    """Run a script in forked processes with torchrun's environment and one thread, and return its output."""
    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with ExitStack() as opened:
        said = [opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        printed = [opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = [
            opened.enter_context(
                WarmProcess(
                    [sys.executable, job, *arguments],
                    env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
                    stdin=subprocess.DEVNULL,
                    stdout=printed[rank],
                    stderr=said[rank],
                )
            )
            for rank in range(ranks)
        ]
        failed = _first_failure(processes, time.monotonic() + timeout)
        for process in processes:
            process.kill()
        assert failed is None, _text(said[failed])[-3000:] or f"rank {failed} took longer than {timeout} s"
        return "".join(map(_text, printed))


def _first_failure(processes: list[WarmProcess], deadline: float) -> int | None:
    """Return the rank that failed first, or that did not finish in time."""
    while True:
        ended = [process.poll() for process in processes]
        for rank, status in enumerate(ended):
            if status or (status is None and time.monotonic() > deadline):
                return rank
        if None not in ended:
            return None
        time.sleep(0.02)


def _text(file: IO[Any]) -> str:
    file.seek(0)
    return str(file.read())


def torchrun(job: str | Path, *arguments: object, ranks: int = 2, timeout: float = 280) -> str:
    """Run a script like `run_ranks`, but let torchrun start it, which costs twenty seconds more per rank."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [*launcher, str(job), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
