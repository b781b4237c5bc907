"""How Ctrl-C and SIGTERM end a command while it is being loaded. It imports next to nothing: from the moment
that this module is there, no signal ends in a traceback."""

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
"""Not empty where this process is a command's."""

_said: list[bool] = []
"""Not empty once this process has said that it was stopped."""


def end_at_signals() -> None:
    """From here on a signal ends this process at once."""
    for number in STOPS:
        _heed(number, _end_at_once)


def raise_interrupts() -> None:
    """From here on a signal is a `KeyboardInterrupt`."""
    for number in STOPS:
        _heed(number, signal.default_int_handler)


def import_module(name: str) -> ModuleType:
    """Import a module. Where signals are a command's, they end the process at once meanwhile: nothing is
    lost, and a module that is half imported might raise any error."""
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
    """Let signals be a command's, from its first moment on."""
    _begun.append(True)
    end_at_signals()


def say_stopped() -> None:
    """Say so on standard error; in a command's process once."""
    if not _begun:
        print("stopped", file=sys.stderr)
    elif not _said:
        _said.append(True)
        try:
            os.write(2, b"stopped\n")
        except OSError:  # standard error is closed, or full
            return


def _heed(number: signal.Signals, handler: Any) -> None:
    """Set a handler, unless whoever started this process has it ignore the signal."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    say_stopped()
    os._exit(INTERRUPTED)
