"""Progress on a terminal: `tandem.observability.display` at the bottom, other output above it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import wait

from tandem.lifetime import last_words
from tandem.observability.sinks.base import RunInfo
from tandem.observability.sinks.console import ConsoleSink
from tandem.observability.terminal import plain_console

_DISPLAY = "tandem.observability.display"
_LIMIT_S = 5.0


def console_sink(info: RunInfo) -> ConsoleSink:
    """Return a sink with the live display if the terminal supports it, else a sink that prints lines.

    In an interactive Python session, the sink prints lines too.
    """
    console = plain_console()
    shows = (
        sys.stdout.isatty()
        and console.file.fileno() == 1
        and not (console.is_dumb_terminal or console.no_color or console.options.ascii_only)
        and not hasattr(sys, "ps1")
    )
    return LiveSink(info) if shows else ConsoleSink(info)


class LiveSink(ConsoleSink):
    """A sink with a display at the bottom of the terminal; validations and the last step also print lines.

    While the display runs, standard output and error (if they were the terminal) are a pipe to the display's
    process. Output of libraries and child processes also goes through the pipe. Standard output and error are
    always restored at the end, even if the display fails.
    """

    seconds_between_lines = math.inf

    def __init__(self, info: RunInfo) -> None:
        super().__init__(info)
        self._streams = {number: os.dup(number) for number in (1, 2) if os.isatty(number)}
        self._printed, into = os.pipe()
        steps = map(str, (info.start_step, info.total_steps))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _DISPLAY, info.folder, *steps],
            stdin=self._printed,
            stdout=self._streams[1],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)},
            start_new_session=True,  # Ctrl-C must reach only the run
        )
        sys.stdout.flush()
        sys.stderr.flush()
        for number in self._streams:
            os.dup2(into, number)
        os.close(into)
        self._restored = threading.Event()
        threading.Thread(target=self._restore, name="display", daemon=True).start()
        last_words.append(self._give_back)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._process.poll() is not None:
            self.seconds_between_lines = ConsoleSink.seconds_between_lines
        super().log(step, metrics)

    def close(self) -> None:
        super().close()
        self._give_back()
        last_words.remove(self._give_back)  # last: a second signal may end the process meanwhile

    def _give_back(self) -> None:
        """Stop the display and remove its picture."""
        sys.stderr.flush()
        self._process.terminate()
        if not self._restored.wait(_LIMIT_S):  # the terminal may be stopped
            self._process.kill()
            self._restored.wait(_LIMIT_S)

    def _restore(self) -> None:
        """Wait for the end of the display, then forward the pipe to the terminal.

        Processes of the run may still write to the pipe.
        """
        self._process.wait()
        for number, stream in self._streams.items():
            os.dup2(stream, number)
        while True:
            if not wait([self._printed], 0):
                self._restored.set()
            left = os.read(self._printed, 1 << 16)
            if not left:
                break
            os.write(self._streams[1], left)
        self._restored.set()
        for number in (self._printed, *self._streams.values()):
            os.close(number)
