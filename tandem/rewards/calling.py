"""Call a user's functions so that they cannot end the process and need no event loop."""

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

LOAD_SECONDS = 30.0  # a user's file may always take at least this long to load
SLOW_SECONDS = 30.0  # a message tells the user if there is no result after this time
MESSAGE_CHARACTERS = 2000  # how many characters of an exception's text are shown
RETRY_REMEDY = (
    "set reward.retries=2 to retry if a service fails; set reward.on_error=zero or drop to continue without"
)
_NETWORK = (ConnectionError, TimeoutError, ssl.SSLError, urllib.error.URLError, http.client.HTTPException)
_CLIENTS = {"httpx", "httpx2", "httpcore", "requests", "urllib3", "aiohttp", "openai", "anthropic", "grpc"}
_CLIENTS |= {"websockets", "botocore", "litellm", "socket"}
_OURS = str(Path(__file__).parents[1])
_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_NOT_OWN = ("<", *(f"{sysconfig.get_path(name)}/" for name in _PATHS))
"""The first characters of file names that are not the user's code."""


def load_seconds(timeout: float) -> float:
    """Return the time limit for loading a user's file, in seconds, for calls with the limit `timeout`."""
    return max(LOAD_SECONDS, timeout)


class _TooLong(BaseException):
    """Raised at the time limit. The class does not derive from Exception, which the user's code may catch."""


@contextmanager
def limited(seconds: float, what: str) -> Iterator[None]:
    """Stop the block after a time limit; if the block is slow, tell the user before the limit.

    Outside the main thread there is no limit, because Python cannot interrupt other threads.

    Args:
        seconds: The time limit.
        what: What the block loads, for the message.

    Raises:
        TimeoutError: The block took longer.
    """
    if seconds == math.inf or threading.current_thread() is not threading.main_thread():
        yield
        return
    until, unsaid = time.monotonic() + seconds, [f"{what} is still loading; the limit is {seconds:g} s"]

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
    """Make `os._exit` in this thread raise SystemExit, as `sys.exit` does.

    A user's function must not end the process without a message. Other threads and forked processes can exit
    as usual. If the function forks and the child process returns from the function, the child is stopped
    here, because only the original process may continue.
    """
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
        end_forked_copy(owner[0])


def end_forked_copy(pid: int) -> None:
    """End this process if it is a copy that a user's function made with `os.fork`."""
    if os.getpid() != pid:
        with suppress(OSError):
            os.write(2, b"a reward function forked its process, and the copy returned; the copy is ended\n")
        os.kill(os.getpid(), signal.SIGKILL)


def describe_error(error: BaseException) -> str:
    """Describe an exception of a function, with the last line of the user's own code (not of a library)."""
    if isinstance(error, SystemExit):
        return f"tried to end the process with exit status {as_text(error.code)}"
    return f"raised {type(error).__name__}: {as_text(error)}{_place(error)}"


def as_text(value: object) -> str:
    """Return a value as text that can be printed on a terminal, or its type if it cannot be converted."""
    try:
        return printable(str(value)[:MESSAGE_CHARACTERS])
    except BaseException:  # __str__ is the user's code
        return f"({type(value).__name__} that cannot be shown as text)"


def _place(error: BaseException) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<frozen importlib"))
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_OWN)]
    own = own or [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({printable(Path(own[-1].filename).name)}, line {own[-1].lineno})" if own else ""


def is_network_error(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, comes from a network or a server."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        if isinstance(error, _NETWORK) or modules & _CLIENTS:
            return True
        error = error.__cause__ or error.__context__
    return False


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine and return its result.

    All coroutines of a process run in the same event loop, in a thread that stays. So a function can keep
    objects that belong to a loop (a client, a lock) from call to call.

    Raises:
        BaseException: The exception that the coroutine raised.
    """

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            with exits_raised():
                return await coroutine, None
        except BaseException as error:  # SystemExit would end the loop
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
    """Run an event loop; if a user's task raises SystemExit or KeyboardInterrupt, keep running."""
    while not loop.is_closed():
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
