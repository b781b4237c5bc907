"""The handling of Ctrl-C and SIGTERM while a command is being loaded.

This module imports very few modules, so that signals are handled early. After its import, a signal no longer
ends the command with a traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType, ModuleType
from typing import Any

INTERRUPTED = 130
"""The exit status after Ctrl-C or SIGTERM."""

STOPS = (signal.SIGINT, signal.SIGTERM)
_begun: list[bool] = []
"""A list that is not empty if this process runs a command."""

_said: list[bool] = []
"""A list that is not empty after this process has printed "stopped"."""


def end_at_signals() -> None:
    """Let a signal end this process at once, from now on."""
    for number in STOPS:
        _heed(number, _end_at_once)


def raise_interrupts() -> None:
    """Let a signal raise `KeyboardInterrupt`, from now on."""
    for number in STOPS:
        _heed(number, signal.default_int_handler)


def import_module(name: str) -> ModuleType:
    """Import a module.

    In a process that runs a command, signals end the process at once during the import. No work is lost at
    this time, but an interrupted import could raise any error.
    """
    before = [(number, signal.getsignal(number)) for number in STOPS]
    ours = all(handler in (signal.default_int_handler, _end_at_once) for _, handler in before)
    if not (_begun and ours):
        return importlib.import_module(name)
    end_at_signals()
    try:
        return importlib.import_module(name)
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def begin() -> None:
    """Mark this process as one that runs a command, and let signals end it at once."""
    _begun.append(True)
    end_at_signals()


def say_stopped() -> None:
    """Print "stopped" to standard error. A process that runs a command prints it only once."""
    if not _begun:
        print("stopped", file=sys.stderr)
    elif not _said:
        _said.append(True)
        try:
            os.write(2, b"stopped\n")
        except OSError:  # standard error is closed, or full
            return


def _heed(number: signal.Signals, handler: Any) -> None:
    """Set a handler for a signal, unless the parent process made this process ignore the signal."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    say_stopped()
    os._exit(INTERRUPTED)
