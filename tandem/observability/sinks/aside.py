"""A sink on a separate thread, so that a slow or failing experiment tracker does not delay training."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from tandem.observability.sinks.base import Sink

LIMIT_S = 60.0
Call = Callable[[Sink], None]


class Aside:
    """A sink on a separate thread, which handles one call after another.

    Args:
        make: creates the sink, in the separate thread.
        limit_s: the time limit, in seconds, for the start, for one call, and at the end for all remaining
            calls.
        waits: whether a call returns only after the sink has handled it.
    """

    def __init__(self, make: Callable[[], Sink], limit_s: float, *, waits: bool) -> None:
        self._limit_s, self._waits = limit_s, waits
        self._calls: SimpleQueue[tuple[str, Call | None, threading.Event]] = SimpleQueue()
        self._error: BaseException | None = None
        self._what, self._since = "at the start", time.monotonic()  # since when it works; infinity while idle
        self._deadline = math.inf
        self._thread = threading.Thread(target=self._work, args=(make,), daemon=True)
        self._thread.start()

    def call(self, step: int, call: Call) -> None:
        """Queue a call for the sink."""
        self._put(f"at step {step}", call)

    def end(self) -> None:
        """Request to close the sink after all queued calls. `join` waits until the sink is closed."""
        self._deadline = time.monotonic() + self._limit_s
        self._put("at the end", None)

    def join(self) -> None:
        """Wait until the sink is closed, for at most `limit_s` seconds."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))

    def trouble(self) -> str | None:
        """Return a description of the sink's failure, as part of a sentence; None without a failure."""
        if self._error is not None:
            return f"failed {self._what} ({self._error!r})"
        now = time.monotonic()
        if self._thread.is_alive() and (now - self._since > self._limit_s or now >= self._deadline):
            return f"did not answer {self._what} within {self._limit_s:g} s"
        return None

    def _put(self, what: str, call: Call | None) -> None:
        done = threading.Event()
        self._calls.put((what, call, done))
        if self._waits:
            done.wait(self._limit_s)

    def _work(self, make: Callable[[], Sink]) -> None:
        done = threading.Event()
        try:
            sink = make()
            while True:
                self._since = math.inf
                self._what, call, done = self._calls.get()
                self._since = time.monotonic()
                if call is None:
                    sink.close()
                    return
                call(sink)
                done.set()
        except BaseException as error:  # a tracker's client may raise anything, even SystemExit
            self._error = error
        finally:
            done.set()
