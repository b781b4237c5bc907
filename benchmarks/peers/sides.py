"""Two sides of a comparison that take turns: each is a process of its own, in its own environment, that
answers questions one line at a time. Needs nothing but Python."""

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
    """Answers questions until there are no more. Whatever else is printed goes to the error output."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            name, arguments = json.loads(line)
            print(json.dumps(methods[name](**arguments)), file=answers, flush=True)


class Side:
    """The asking end of a process that serves.

    Args:
        command: starts it.
        log: takes its error output.
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
        """The answer to one question; ends the comparison if there is none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            ended = f"ended with {self._process.wait(timeout=60)} when asked for {method}"
            sys.exit(f"{self._process.args} {ended}:\n{self._log.read_text()[-3000:]}")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def seconds(
    work: Callable[..., Any], times: int = 1, prepare: Callable[[], tuple[Any, ...]] = tuple
) -> float:
    """Median seconds of `work(*prepare())`; preparing does not count."""
    took = []
    for _ in range(times):
        arguments = prepare()
        began = time.perf_counter()
        work(*arguments)
        took.append(time.perf_counter() - began)
    return statistics.median(took)
