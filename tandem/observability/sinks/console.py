"""Progress lines for people: one line per step, at most two per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from textwrap import indent

from rich.console import Console
from rich.text import Text

from tandem.observability.sinks.base import Generation, RunInfo
from tandem.observability.terminal import plain_console, printable

# The metrics in a step's line, if the step has them, and their formats.
_HEADLINES = {
    "sft/loss": "loss {:.4f}",
    "rm/loss": "loss {:.4f}",
    "rm/accuracy": "training accuracy {:.3f}",
    "val/loss": "validation loss {:.4f}",
    "reward/mean": "reward {:.3f}",
    "val/accuracy": "accuracy {:.3f}",
    "response_length/mean": "length {:.0f}",
    "perf/step_tokens_per_s": "{:,.0f} tokens/s",
}
_CARRIED = "val/accuracy"  # measured only now and then; the last value is shown in between


class ConsoleSink:
    seconds_between_lines = 0.5

    def __init__(
        self,
        info: RunInfo,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = info
        self._console = console or plain_console()
        self._clock = clock
        self._began = clock()
        self._carried: dict[str, float] = {}
        self._last_line = float("-inf")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if _CARRIED in metrics:
            self._carried[_CARRIED] = metrics[_CARRIED]
        now = self._clock()
        at_end = step >= self._info.total_steps
        if now - self._last_line < self.seconds_between_lines and not at_end and _CARRIED not in metrics:
            return
        self._last_line = now
        shown = {**metrics, **self._carried}
        parts = [f"step {step}/{self._info.total_steps}"]
        parts += [form.format(shown[name]) for name, form in _HEADLINES.items() if name in shown]
        parts += self._time_left(step, now)
        self._console.print("  ".join(parts), soft_wrap=True)

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        for number, generation in enumerate(generations, 1):
            self._console.print(
                f"validation after step {step}, response {number} of {len(generations)}, "
                f"score {generation.score:g}"
            )
            for text in (generation.prompt, generation.response):
                self._console.print(Text(indent(printable(text), "  | ", lambda line: True)), soft_wrap=True)

    def close(self) -> None:
        self._console.file.flush()

    def _time_left(self, step: int, now: float) -> list[str]:
        """Return the remaining time, from the mean time per step so far, including validation and saving."""
        steps_done = step - self._info.start_step
        steps_left = self._info.total_steps - step
        if steps_done <= 0 or steps_left <= 0:
            return []
        return [f"{duration((now - self._began) / steps_done * steps_left)} left"]


class FileSink(ConsoleSink):
    """A sink that writes a line for every step, as plain text, to RUN/log/progress.log."""

    seconds_between_lines = 0.0

    def __init__(self, info: RunInfo) -> None:
        folder = info.folder / "log"
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "progress.log").open("a", encoding="utf-8", buffering=1)
        super().__init__(info, plain_console(file=file, width=120, force_terminal=False))

    def close(self) -> None:
        self._console.file.close()


def duration(seconds: float) -> str:
    """Return a duration as text, such as 7 s, 3 min 07 s or 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
