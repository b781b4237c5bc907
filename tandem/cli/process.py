"""The process of a command: its encoding, streams and signals, and the errors that end it."""

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
"""Seconds within which two signals count as one, because the program `timeout` sends its signal twice."""


class OutputError(TandemError):
    """Raised if standard output cannot be written."""


class ReaderGoneError(OutputError):
    """Raised if the reader of standard output has closed the pipe."""

    exit_code = _READER_GONE


class _Output(io.TextIOWrapper):
    """A wrapper of standard output that raises `OutputError` for write errors."""

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


class _ErrorOutput(io.TextIOWrapper):
    """A wrapper of standard error that ignores write errors."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def prepare() -> None:
    """Prepare this process for a command.

    Set up UTF-8 and working standard streams, and let a second signal end the process at once.
    """
    _use_utf8()
    _open_streams()
    _watch_signals()
    atexit.register(_ignore_stops)  # runs last


def outcome(words: list[str], run: Callable[[list[str]], int]) -> int:
    """Run a command.

    Args:
        words: the words after `tandem`.
        run: a function that runs the subcommand in the first word.

    Returns:
        the exit status. The function prints errors that the user can fix.
    """
    try:
        status = run(words)
        sys.stdout.flush()
        return status
    except (TandemError, OSError) as error:
        told = error if isinstance(error, TandemError) else FileError.of(error)
        if isinstance(told, OutputError):  # write nothing more to the stream that failed
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)
        if not isinstance(told, ReaderGoneError):
            import_module("tandem.observability.terminal").warn(f"tandem {' '.join(words[:1])}: {told}")
        return told.exit_code
    except KeyboardInterrupt:
        # CPython remembers an interrupt inside `exec`, which makes dataclasses. Then `python -m tandem` would
        # die of SIGINT, whatever the exit status. Evaluating any text resets this.
        eval("0")
        say_stopped()
        return INTERRUPTED


def _use_utf8() -> None:
    """If the locale does not use UTF-8, restart this process in Python's UTF-8 mode.

    The mode applies to paths, texts and output.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})


def _open_streams() -> None:
    """Open closed standard streams, and make write errors `OutputError`s.

    Otherwise, the next opened files would get the file descriptors of the closed streams. Writing to a
    standard output that was closed is an error.
    """
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)
    by_line = bool(sys.stdout and sys.stdout.line_buffering)
    sys.stdout = _Output(_raw(1), encoding="utf-8", errors="backslashreplace", line_buffering=by_line)
    sys.stderr = _ErrorOutput(_raw(2), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _raw(number: int) -> io.BufferedWriter:
    return io.BufferedWriter(io.FileIO(number, "wb", closefd=False))


def _watch_signals() -> None:
    """Let a second signal end this process at once.

    A thread waits for signals, because during a long computation Python does not run signal handlers.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # the child handles its own signals
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
    """Ignore signals while the interpreter shuts down: they would change the exit status."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def _named(error: OSError) -> OutputError:
    if isinstance(error, BrokenPipeError):
        return ReaderGoneError("the reader of the output closed it")
    return OutputError(
        "cannot be written",
        field="standard output",
        got=error.strerror,
        expected="a terminal, a pipe or a file that can be written",
        remedy="free space there, or send the output to another place",
    )
