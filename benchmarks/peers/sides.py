"""Let the sides of a comparison take turns.

Each side is a process in its own environment. It reads requests and writes answers, one line each. Needs only
Python.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def serve(methods: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests until the input ends. Other output goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            name, arguments = json.loads(line)
            print(json.dumps(methods[name](**arguments)), file=answers, flush=True)


class Side:
    """The client of a process that runs `serve`.

    Args:
        command: starts the process.
        log: the file for the process's stderr.
        environment: further environment variables of the process.
    """

    def __init__(self, command: Sequence[str], log: Path, **environment: str) -> None:
        self._log = log
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=os.environ | environment,
        )

    def ask(self, method: str, **arguments: Any) -> Any:
        """Return the answer to one request; if the process has ended, exit with its log."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            ended = f"ended with {self._process.wait(timeout=60)} during the request {method}"
            sys.exit(f"{self._process.args} {ended}:\n{self._log.read_text()[-3000:]}")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def seconds(
    work: Callable[..., Any], times: int = 1, prepare: Callable[[], tuple[Any, ...]] = tuple
) -> float:
    """Return the median seconds of `work(*prepare())`, without the time of `prepare`."""
    took = []
    for _ in range(times):
        arguments = prepare()
        began = time.perf_counter()
        work(*arguments)
        took.append(time.perf_counter() - began)
    return statistics.median(took)
