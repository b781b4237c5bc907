"""Calls of a user's function, which may neither end the process without a word nor need an event loop."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


@contextmanager
def exits_raised() -> Iterator[None]:
    """Makes `os._exit` in this thread raise SystemExit, as `sys.exit` does: a user's function may not end the
    process without a word. Other threads, and forks of the function's own, exit as ever."""
    exit_at_once, owner = os._exit, (os.getpid(), threading.get_ident())

    def refuse(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != owner:
            exit_at_once(status)
        raise SystemExit(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = exit_at_once


def told(error: BaseException) -> str:
    """What a function did, in words, and where."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(last.filename)
    place = "" if file.parent == Path(__file__).parent else f" ({file.name}, line {last.lineno})"
    if isinstance(error, SystemExit):
        return f"wanted to end the process: exit with status {error.code}"
    return f"raised {type(error).__name__}: {error}{place}"


def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """A coroutine's result. All of a process run in one event loop, in a thread of its own, which stays: what
    a function keeps from call to call (a client, a lock) belongs to its loop.

    Raises:
        Exception, SystemExit: what the coroutine raised.
    """

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            with exits_raised():
                return await coroutine, None
        except (Exception, SystemExit) as error:  # an exit would end the loop
            return None, error

    value, error = asyncio.run_coroutine_threadsafe(outcome(), _event_loop()).result()
    if error is not None:
        raise error
    return value


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop
