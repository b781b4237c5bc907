"""Calls of a user's function, which may neither end the process without a word nor need an event loop."""

from __future__ import annotations

import asyncio
import functools
import http.client
import math
import os
import signal
import ssl
import sysconfig
import threading
import time
import traceback
import urllib.error
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from tandem.observability.terminal import printable, warn

LOAD_SECONDS = 30.0  # the least time that a user's file may take to load
SLOW_SECONDS = 30.0  # after how long without an answer the user hears of it
MESSAGE_CHARACTERS = 2000  # how much of what an exception says is told
AGAIN = "reward.retries=2 calls again where a service fails; reward.on_error=zero, or drop, goes on without"
_NETWORK = (ConnectionError, TimeoutError, ssl.SSLError, urllib.error.URLError, http.client.HTTPException)
_CLIENTS = {"httpx", "httpx2", "httpcore", "requests", "urllib3", "aiohttp", "openai", "anthropic", "grpc"}
_CLIENTS |= {"websockets", "botocore", "litellm", "socket"}
_OURS = str(Path(__file__).parents[1])
_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_NOT_OWN = ("<", *(f"{sysconfig.get_path(name)}/" for name in _PATHS))
"""How the names of files begin that are not the user's."""


def load_seconds(timeout: float) -> float:
    """Return how long a user's file may take to load, where a call may take `timeout`."""
    return max(LOAD_SECONDS, timeout)


class _TooLong(BaseException):
    """Not an Exception, which the user's code might catch."""


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """End what takes longer, and say after a while that it takes long. Other threads than the main one have
    no limit: Python has no means to end what they do.

    Raises:
        TimeoutError: it took longer.
    """
    if seconds == math.inf or threading.current_thread() is not threading.main_thread():
        yield
        return
    until, unsaid = time.monotonic() + seconds, [f"{what} still loads; it may take {seconds:g} s"]

    def ring(*_: object) -> None:
        if time.monotonic() >= until:
            raise _TooLong
        while unsaid:
            warn(unsaid.pop())

    before = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, min(SLOW_SECONDS, seconds), 0.5)
    try:
        yield
    except _TooLong:
        raise TimeoutError(f"it took more than {seconds:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@contextmanager
def exits_raised() -> Iterator[None]:
    """Make `os._exit` in this thread raise SystemExit, as `sys.exit` does: a user's function may not end the
    process without a word. Other threads exit as ever, and so do forks: one that comes back from the function
    ends here, for this process goes on once."""
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
        end_copy(owner[0])


def end_copy(pid: int) -> None:
    """End this process if it is a copy of another, made by `os.fork` in a user's function."""
    if os.getpid() != pid:
        with suppress(OSError):
            os.write(2, b"a copy that a reward function made of its process came back; it is ended\n")
        os.kill(os.getpid(), signal.SIGKILL)


def told(error: BaseException) -> str:
    """Return what a function did, in words, and where: its own last line, not that of a library it called."""
    if isinstance(error, SystemExit):
        return f"wanted to end the process: exit with status {said_by(error.code)}"
    return f"raised {type(error).__name__}: {said_by(error)}{_place(error)}"


def said_by(value: object) -> str:
    """Return a value as text that a terminal may show, or its type where it has no such text."""
    try:
        return printable(str(value)[:MESSAGE_CHARACTERS])
    except BaseException:  # its __str__ is the user's
        return f"({type(value).__name__} without a text)"


def _place(error: BaseException) -> str:
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_OWN)]
    own = own or [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({printable(Path(own[-1].filename).name)}, line {own[-1].lineno})" if own else ""


def of_network(error: BaseException | None) -> bool:
    """Return whether an exception, or one that it came of, tells of a network or a server."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        if isinstance(error, _NETWORK) or modules & _CLIENTS:
            return True
        error = error.__cause__ or error.__context__
    return False


def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return a coroutine's result. All of a process run in one event loop, in a thread of its own, which
    stays: what a function keeps from call to call (a client, a lock) belongs to its loop.

    Raises:
        BaseException: what the coroutine raised.
    """

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            with exits_raised():
                return await coroutine, None
        except BaseException as error:  # an exit would end the loop
            return None, error

    value, error = asyncio.run_coroutine_threadsafe(outcome(), _event_loop()).result()
    if error is not None:
        raise error
    return value


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_forever, args=(loop,), name="rewards", daemon=True).start()
    return loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop, also after a task of the user's has raised SystemExit or KeyboardInterrupt."""
    while not loop.is_closed():
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
