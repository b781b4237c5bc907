"""The process of a command: its encoding, its streams, its second signal, the errors that it ends with."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tandem.cli.signals import INTERRUPTED, STOPS, import_module, say_stopped
from tandem.errors import FileError, TandemError
from tandem.lifetime import end_now, last_words

_READER_GONE = 141
_SAME_S = 0.002
"""Two signals within this time are one: `timeout` sends its own twice."""


class OutputError(TandemError):
    """Standard output cannot be written."""


class ReaderGoneError(OutputError):
    """Whoever read standard output has enough."""

    exit_code = _READER_GONE


class _Output(io.TextIOWrapper):
    """Standard output, whose errors have a name."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise _named(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _named(error) from error


class _Complaints(io.TextIOWrapper):
    """Standard error. Where it cannot be written, nobody can be told, and the work goes on."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def prepare() -> None:
    """Make this process a command's: in UTF-8, with streams to rely on, ended by a second signal."""
    _speak_utf8()
    _mend_streams()
    _watch_signals()
    atexit.register(_ignore_stops)  # called last


def outcome(words: list[str], run: Callable[[list[str]], int]) -> int:
    """Run a command.

    Args:
        words: after `tandem`.
        run: does what they ask for.

    Returns:
        the exit status. An error that the user can act on was told.
    """
    try:
        status = run(words)
        sys.stdout.flush()
        return status
    except (TandemError, OSError) as error:
        told = error if isinstance(error, TandemError) else FileError.of(error)
        if isinstance(told, OutputError):  # let nothing more go where what was printed could not be written
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)
        if not isinstance(told, ReaderGoneError):
            import_module("tandem.observability.terminal").warn(f"tandem {' '.join(words[:1])}: {told}")
        return told.exit_code
    except KeyboardInterrupt:
        say_stopped()
        return INTERRUPTED


def _speak_utf8() -> None:
    """Start this process again in Python's UTF-8 mode where the locale has another encoding, for paths, texts
    and what is printed."""
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})


def _mend_streams() -> None:
    """Open streams that are closed, whose numbers the next files would take; give their errors names. A
    closed standard output is one that cannot be written."""
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)
    by_line = bool(sys.stdout and sys.stdout.line_buffering)
    sys.stdout = _Output(_raw(1), encoding="utf-8", errors="backslashreplace", line_buffering=by_line)
    sys.stderr = _Complaints(_raw(2), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _raw(number: int) -> io.BufferedWriter:
    return io.BufferedWriter(io.FileIO(number, "wb", closefd=False))


def _watch_signals() -> None:
    """Let a second signal end this process at once, also while a long computation keeps the first one's
    handler waiting: a thread reads which signals come."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are its own
    last_words.append(say_stopped)
    threading.Thread(target=_end_at_second, args=(told,), daemon=True, name="signals").start()


def _end_at_second(told: int) -> None:
    first = None
    while number := os.read(told, 1):
        if number[0] not in STOPS:
            continue
        now = time.monotonic()
        if first is not None and now - first > _SAME_S:
            end_now(INTERRUPTED)
        first = now


def _ignore_stops() -> None:
    """While the interpreter takes itself apart, a signal would end it with another status."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def _named(error: OSError) -> OutputError:
    if isinstance(error, BrokenPipeError):
        return ReaderGoneError("whoever read the output has enough")
    return OutputError(
        "cannot be written",
        field="standard output",
        got=error.strerror,
        expected="a terminal, a pipe or a file that takes what is printed",
        remedy="free space there, or send the output elsewhere",
    )
