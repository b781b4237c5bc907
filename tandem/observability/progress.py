"""The progress of a long task: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tandem.observability.terminal import plain_console

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """A counter of finished samples that shows progress and rate, even before the first sample is finished.

    Args:
        what: the task, such as "generate".
        total: the number of samples.
        done: the number of samples that an earlier run finished; the rate does not include these samples.
        unit: the unit of the other count in `advance`, such as tokens, for the rate.
        console: the console that shows the progress; default: standard error.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        done: int = 0,
        unit: str = "tokens",
        console: Console | None = None,
    ) -> None:
        self._what, self._total, self._done, self._unit, self._units = what, total, done, unit, 0
        self._console = console or plain_console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, completed=done, rate="")
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._say_lines, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        self._began = time.monotonic()
        if not self._console.is_terminal:
            self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if not self._console.is_terminal:
            self._ended.set()
            self._lines.join()
            self._line()

    def advance(self, samples: int, units: int) -> None:
        self._done += samples
        self._units += units
        self._bar.update(self._task, advance=samples, rate=self._rate())

    def _say_lines(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LINES):
            self._line()

    def _rate(self) -> str:
        return f"{self._units / max(time.monotonic() - self._began, 1e-9):,.0f} {self._unit}/s"

    def _line(self) -> None:
        seconds = time.monotonic() - self._began
        self._console.print(
            f"{self._what}: {self._done}/{self._total} samples in {seconds:.0f} s, {self._rate()}",
            soft_wrap=True,
        )
