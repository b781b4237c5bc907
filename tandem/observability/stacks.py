"""Read the Python stacks of the controller from another process.

The controller writes its stacks when it receives a signal, even if the interpreter hangs in native code.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import TextIO

from tandem.errors import DataError
from tandem.observability.files import replace_file
from tandem.observability.lock import process_start
from tandem.texts import parse_json

_PROCESS = "controller.json"
_STACKS = "controller.stacks"
_OPEN: dict[str, TextIO] = {}
"""The file to which the signal handler writes. It must stay open."""
_WAIT_S = 2.0
"""Seconds that the process has to write its stacks after the signal."""


def offer_stacks(log_dir: Path) -> None:
    """Make this process write the stacks of all its threads to `log_dir` when `ask_stacks` asks."""
    pid = os.getpid()
    process = {"pid": pid, "started": process_start(pid), "node": socket.gethostname()}
    replace_file(log_dir / _PROCESS, json.dumps(process).encode())
    before = _OPEN.pop("stacks", None)
    _OPEN["stacks"] = (log_dir / _STACKS).open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, _OPEN["stacks"], all_threads=True)
    if before is not None:
        before.close()


def withdraw_stacks(log_dir: Path) -> None:
    """Undo `offer_stacks`."""
    faulthandler.unregister(signal.SIGUSR1)
    _OPEN.pop("stacks").close()
    for name in (_PROCESS, _STACKS):
        (log_dir / name).unlink(missing_ok=True)


def ask_stacks(log_dir: Path) -> tuple[str, str]:
    """Return the controller's name and its stacks.

    Raises:
        DataError: If the run has no controller, or its process file is damaged.
    """
    try:
        process = parse_json((log_dir / _PROCESS).read_text(encoding="utf-8"))
        name = f"controller (node {process['node']}, pid {process['pid']})"
        began = process["started"]
    except FileNotFoundError as error:
        raise DataError("no run has started in this folder", field=str(log_dir.parent)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError("the file names no process", field=str(log_dir / _PROCESS), got=error) from error
    if process["node"] != socket.gethostname():
        return name, "runs on another machine; run this command there"
    if process_start(process["pid"]) != began:
        return name, "this process has ended"
    stacks = log_dir / _STACKS
    before = stacks.stat().st_size
    os.kill(process["pid"], signal.SIGUSR1)
    deadline = time.monotonic() + _WAIT_S
    while stacks.stat().st_size == before and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.05)  # the rest of the lines
    text = stacks.read_text(encoding="utf-8")[before:]
    if text.endswith("\n...\n"):
        text += "Python writes at most 100 threads, the newest first. The main thread is not among them.\n"
    return name, text or f"no answer within {_WAIT_S:g} s"
