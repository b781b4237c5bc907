"""Jobs on several ranks, which torchrun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(
    job: str | Path, *arguments: object, ranks: int = 2, timeout: float = 280, **environment: str
) -> str:
    """What a script printed on so many ranks of this machine, each in one thread. It finds what the tests
    find on their path.

    Args:
        timeout: seconds.
        environment: further variables of it.

    Raises:
        AssertionError: it failed; with the end of what it said.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [*launcher, str(job), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
