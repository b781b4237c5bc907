"""A live display of a run at the bottom of a terminal.

`python -m tandem.observability.display RUN …` is a separate process that reads the run folder. All output of
the run and its libraries goes through a pipe to this process, which writes the output above the display, byte
by byte. So the display also works while the run computes, and when the run crashes.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, BinaryIO

from rich.text import Text

from tandem.observability.files import GrowingFile
from tandem.observability.reading import SHOWN
from tandem.observability.sinks.console import duration
from tandem.observability.terminal import plain_console, printable
from tandem.texts import parse_json

TICK_S = 0.25
STEPS_SHOWN = 40
_LAST_BYTES = 1 << 20  # read from the end of each file at first, because files of a long run are large
_BARS = "▁▂▃▄▅▆▇█"


class Picture:
    """The display's content: the current state of a run as a few lines of text.

    Args:
        folder: the run folder.
        start_step: the step of the checkpoint that the run continues from.
        total_steps: the last step of the run.
        process: the process id of the run. Its memory is shown if no device's memory is known.
    """

    def __init__(self, folder: Path, start_step: int, total_steps: int, process: int) -> None:
        self._folder, self._process = folder, process
        self._start, self._total = start_step, total_steps
        self._files: dict[str, GrowingFile] = {}
        self._began = self._done_at = time.time()
        self._curves: dict[str, deque[float]] = {name: deque(maxlen=STEPS_SHOWN) for name in SHOWN}
        self._metrics: dict[str, float] = {}
        self._warning = ""
        self._tracks: dict[int, str] = {}
        self._open: dict[int, list[tuple[str, float]]] = {}
        self.step = self._running = start_step  # the last finished step, and the current one

    def look(self) -> None:
        """Read the lines that the run has written to its folder since the last call."""
        for row in self._new("metrics.jsonl"):
            self._metrics = {name: value for name, value in row.items() if value is not None}
            for name in self._curves.keys() & self._metrics.keys():
                self._curves[name].append(self._metrics[name])
            if row["step"] > self.step:
                self.step, self._done_at = row["step"], time.time()
        for event in self._new("events.jsonl"):
            if event["event"] == "start":
                self._warning = ""
            elif event["event"] == "warning":
                self._warning = f"step {event['step']}: {one_line(event['text'])}"
        for event in self._new("timeline.json"):
            self._take_phase(event)

    def _new(self, name: str) -> Iterator[dict[str, Any]]:
        _, lines = self._files.setdefault(name, GrowingFile(self._folder / name, _LAST_BYTES)).look()
        return (parse_json(line.rstrip(b",")) for line in lines if len(line) > 1)

    def _take_phase(self, event: dict[str, Any]) -> None:
        kind, track = event["ph"], event["tid"]
        if kind == "M":
            self._tracks[track] = one_line(event["args"]["name"]).partition(" rank ")[0]
            if self._tracks[track] == "controller":  # it starts last, so open phases belong to a killed run
                self._open.clear()
        elif kind == "B":
            self._running = event["args"].get("step", self._running)
            self._open.setdefault(track, []).append((one_line(event["name"]), event["ts"] / 1e6))
        elif self._open.get(track):
            self._open[track].pop()

    def lines(self, width: int) -> list[Text]:
        """Return the picture in lines of at most `width` columns."""
        lines = [Text(f"── {one_line(str(self._folder))} ".ljust(width, "─"), "dim")]
        lines += [
            Text.assemble((f"{label:<12} ", "dim"), content) for label, content in self._rows(width - 13)
        ]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines

    def _rows(self, room: int) -> Iterator[tuple[str, Text]]:
        yield "step", self._progress(room)
        yield "now", Text(self._phases(), "cyan")
        for name, values in self._curves.items():
            if values:
                number = f"{values[-1]:<9.3f} "
                bars = sparkline(list(values)[-max(room - len(number), 1) :])
                yield name.removesuffix("/mean"), Text.assemble((number, "bold"), (bars, "green"))
        if (rate := self._metrics.get("perf/step_tokens_per_s")) is not None:
            yield "speed", Text(f"{rate:,.0f} tokens/s", "bold")
        if (found := self._metrics.get("rollout/log_prob_diff_mean")) is not None:
            limit = self._metrics["rollout/log_prob_diff_limit"]
            color = "bold red" if found > limit else "bold"
            yield "mismatch", Text.assemble((f"{found:.2g} nats", color), f" of {limit:.2g} allowed")
        if memory := self._memory():
            yield "memory", memory
        if self._warning:
            yield "warning", Text(self._warning, "yellow")

    def _progress(self, room: int) -> Text:
        done, left = self.step - self._start, self._total - self.step
        counted, ahead = f"{self._running} of {self._total}  ", ""
        if done > 0 and left > 0:
            seconds = (self._done_at - self._began) / done * left - (time.time() - self._done_at)
            ahead = f"  {duration(max(seconds, 0))} left"
        wide = min(max(room - len(counted) - len(ahead), 0), STEPS_SHOWN)
        full = wide * self.step // max(self._total, 1)
        return Text.assemble((counted, "bold"), ("━" * full, "green"), ("━" * (wide - full), "dim"), ahead)

    def _phases(self) -> str:
        """Return the running phases of the worker groups; if there are none, the controller's phase."""
        running: dict[tuple[str, str], float] = {}
        for track, phases in self._open.items():
            for name, since in phases[-1:]:
                key = (self._tracks.get(track, ""), name)
                running[key] = min(since, running.get(key, since))
        found = {key: since for key, since in running.items() if key[0] != "controller"} or running
        ago = {key: duration(max(time.time() - since, 0)) for key, since in found.items()}
        return ", ".join(f"{name} ({role}) {seconds}" for (role, name), seconds in ago.items())

    def _memory(self) -> Text | None:
        """Return the memory line: the phase closest to its planned device memory, else the host memory."""
        peaks, plan = self._below("perf/memory_peak_bytes/"), self._below("perf/memory_predicted_bytes/")
        if peaks:
            phase = max(peaks, key=lambda name: peaks[name] / plan.get(name, math.inf))
            color = "bold red" if peaks[phase] > plan.get(phase, math.inf) else "bold"
            planned = f" of {size(plan[phase])} planned" if phase in plan else ""
            return Text.assemble((size(peaks[phase]), color), f"{planned}, in {phase}")
        try:
            pages = int(Path(f"/proc/{self._process}/statm").read_text(encoding="utf-8").split()[1])
        except OSError:  # not Linux, or the run has just ended
            return None
        phase = max(plan, key=plan.__getitem__, default="")
        planned = f"; planned {size(plan[phase])} of tensors, in {phase}" if phase else ""
        return Text.assemble((size(pages * os.sysconf("SC_PAGE_SIZE")), "bold"), f" resident{planned}")

    def _below(self, prefix: str) -> dict[str, float]:
        found = self._metrics.items()
        return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}


def sparkline(values: list[float]) -> str:
    """Return the values as bars, from the shortest bar for the minimum to the longest for the maximum."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / ((high - low) or 1.0)
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def size(count: float) -> str:
    """Return a number of bytes as text in GiB, or in MiB if the number is below 0.1 GiB."""
    return f"{count / 2**30:.2f} GiB" if count > 0.1 * 2**30 else f"{count / 2**20:.1f} MiB"


def one_line(text: str) -> str:
    """Return the text without control characters and line breaks."""
    return " ".join(printable(text).split())


class Screen:
    """A terminal that shows a picture below the printed output.

    The cursor stays visible, on the line after the picture, so you can use the terminal at any time.

    Attributes:
        open_line: whether the last output does not end with a line end, for example a prompt for input. The
            picture is not shown in this case.
    """

    def __init__(self, terminal: BinaryIO) -> None:
        self._terminal = terminal
        self._shown = b""
        self.open_line = False

    def show(self, above: bytes, picture: bytes) -> None:
        """Print the bytes `above` and redraw the picture below them."""
        if above:
            self.open_line = not above.endswith(b"\n")
        picture = b"" if self.open_line else picture
        if above or picture != self._shown:
            rows = self._shown.count(b"\n")
            self._terminal.write((b"\x1b[%dF\x1b[J" % rows if rows else b"") + above + picture)
            self._terminal.flush()
            self._shown = picture


def show_until_end(picture: Picture, printed: int, screen: Screen, ended: threading.Event) -> None:
    """Show the picture below the output that arrives in a pipe.

    The function returns when the pipe is closed, or when the run has ended and the pipe is empty.

    Args:
        picture: the picture.
        printed: the file descriptor of the pipe.
        screen: the terminal.
        ended: an event that is set when the display must release the terminal; the picture is then removed.
    """
    console, parent, due, shown, before = plain_console(), os.getppid(), 0.0, b"", (0, 0)
    while True:
        readable = wait([printed], TICK_S)
        above = os.read(printed, 1 << 16) if readable else b""
        if not above and (readable or ended.is_set() or os.getppid() != parent):
            if ended.is_set():
                screen.show(b"", b"")
            return
        columns, rows = now = os.get_terminal_size(sys.stdout.fileno())
        if time.monotonic() >= due or now != before:
            due, before, step = time.monotonic() + TICK_S, now, picture.step
            picture.look()
            if screen.open_line and picture.step > step and not above:  # the prompt for input was answered
                above = b"\n"
            with console.capture() as captured:
                for line in picture.lines(max(columns - 1, 1))[: rows - 1]:
                    console.print(line, soft_wrap=True)
            shown = captured.get().encode()
        screen.show(above, shown)


def main() -> None:
    folder, start_step, total_steps = sys.argv[1:]
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    picture = Picture(Path(folder), int(start_step), int(total_steps), os.getppid())
    show_until_end(picture, sys.stdin.fileno(), Screen(sys.stdout.buffer), ended)


if __name__ == "__main__":
    main()
