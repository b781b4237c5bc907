"""Send requests to an OpenAI-compatible chat server, with rate limits, and cache the answers.

The limits apply to all processes of a machine that send requests to the same address. The processes share
locks on files next to the cached answers. The system releases a lock when its process dies.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Annotated, Any
from weakref import WeakKeyDictionary

import httpx2
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from tandem.errors import RewardError
from tandem.texts import parse_json

PAUSE_SECONDS = 0.5  # before the second try; each further pause is twice as long, up to `LONGEST_PAUSE`
LONGEST_PAUSE = 30.0
LONGEST_WAIT = 120.0  # if the server asks to wait longer than this, the request fails
POLL_SECONDS = 0.02
LARGEST_ANSWER = 4 * 2**20
PASSING = (408, 409, 425, 429)  # status codes that may be temporary, besides 500 and above


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", strict=True))
class JudgeServer:
    """A chat server for a judge model, and the limits for requests.

    Attributes:
        url: The address before `/chat/completions`, such as http://127.0.0.1:8000/v1.
        model: The name of the model on the server.
        api_key_env: The environment variable with the API key; None: the server needs no key.
        concurrent: The maximum number of simultaneous requests, from all processes of this machine.
        per_minute: The maximum number of requests per minute, evenly spaced, from all processes of this
            machine; None: no limit.
        timeout: The time limit of one try, in seconds.
        tries: The maximum number of tries for a request that fails for a temporary reason.
        options: Additional entries of the request, such as temperature or max_tokens.
        cache: The folder for answers and locks; None: the user's cache folder.
    """

    url: Annotated[str, Field(pattern="^https?://")]
    model: str
    api_key_env: str | None = None
    concurrent: Annotated[int, Field(ge=1)] = 8
    per_minute: Annotated[float, Field(ge=1e-3)] | None = None
    timeout: Annotated[float, Field(ge=1e-3)] = 60.0
    tries: Annotated[int, Field(ge=1)] = 5
    options: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    cache: str | Path | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> JudgeServer:
        """Return the server for a mapping from attribute name to value.

        Raises:
            RewardError: A name is missing or unknown, or a value is out of range.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            known = [each.name for each in fields(cls)]
            name = error.errors()[0]["loc"][0]
            raise RewardError(
                "the entry is unknown, missing or has a wrong value",
                field=f"the judge's server.{name}",
                got=given.get(str(name), "nothing") if name in known else None,
                expected=f"url (http://… or https://…) and model, and any of {', '.join(known[2:])}",
            ) from None

    @property
    def answers(self) -> Path:
        """The folder with the cached answers of this server's address."""
        users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "judge"
        return Path(self.cache or users).expanduser() / hashlib.sha256(self.url.encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        """The API key, which must never be written to a file or log; "" if no key is needed.

        Raises:
            RewardError: The variable is not set, or has characters that a header must not have.
        """
        key = os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""
        if self.api_key_env and not (key and key.isascii() and key.isprintable()):
            raise RewardError(
                "has characters that are not allowed in a key" if key else "is not set",
                field=f"the environment variable {self.api_key_env}",
                remedy="export it before you start Tandem; server.api_key_env names it",
            )
        return key


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a judge.

    Attributes:
        text: The text of the answer.
        kept: The cache file of the answer, which exists after a call of `keep`.
        tokens: The number of prompt and answer tokens, as the server counts them; 0 for a cached answer.
        seconds: The time from the first try to the answer, without the waits for the limits.
        retries: The number of failed tries.
        cached: Whether the answer came from the cache.
    """

    text: str
    kept: Path
    tokens: int = 0
    seconds: float = 0.0
    retries: int = 0
    cached: bool = False

    def keep(self) -> None:
        """Write the answer to the cache, so that later requests cost nothing."""
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        new = self.kept.with_suffix(f".{os.getpid()}-{random.getrandbits(48):x}")
        new.write_text(json.dumps({"text": self.text, "tokens": self.tokens}), encoding="utf-8")
        new.replace(self.kept)


class _Refused(Exception):
    """A try that failed.

    Attributes:
        after: The waiting time in seconds that the server requests; None if the server requests no time.
        final: Whether another try would fail too.
    """

    def __init__(self, problem: str, after: float | None = None, final: bool = False) -> None:
        super().__init__(problem)
        self.after, self.final = after, final


async def ask(server: JudgeServer, messages: list[dict[str, str]]) -> Reply:
    """Return the judge model's answer to a chat, from the cache if possible, else from the server.

    Raises:
        RewardError: All tries failed, or the API key is missing.
    """
    body = {**server.options, "model": server.model, "messages": messages}
    content = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    kept = server.answers / content[:2] / f"{content}.json"
    try:
        return Reply(parse_json(kept.read_text(encoding="utf-8"))["text"], kept, cached=True)
    except (OSError, ValueError, KeyError, TypeError):  # not in the cache, or only a part of it: ask again
        pass
    key, seconds, tried = server.key, 0.0, 0
    client = _client()  # slow the first time, so it must not count as spacing between requests
    while True:
        try:
            async with _turn(server):
                began = time.monotonic()
                try:
                    text, tokens = await _try(server, body, client, key)
                    return Reply(text, kept, tokens, seconds + time.monotonic() - began, tried)
                finally:
                    seconds += time.monotonic() - began
        except _Refused as refused:
            tried += 1
            await asyncio.sleep(_pause(server, refused, tried))


def _pause(server: JudgeServer, refused: _Refused, tried: int) -> float:
    """Return the seconds to wait before the next try.

    Raises:
        RewardError: No more tries are left, or another try would fail too.
    """
    doubled = min(LONGEST_PAUSE, PAUSE_SECONDS * 2 ** (tried - 1)) * random.uniform(0.75, 1.25)
    pause = doubled if refused.after is None else refused.after
    if refused.final or tried >= server.tries or pause > LONGEST_WAIT:
        later = f", and asks to wait {pause:.0f} s" if pause > LONGEST_WAIT else ""
        raise RewardError(
            "no answer from the judge",
            field=f"the judge {server.model} at {server.url}",
            got=f"{refused}{later} (try {tried} of {server.tries})",
            remedy="check that the server runs, and its limits: server.concurrent, per_minute, "
            "timeout, tries, api_key_env; or set reward.on_error=zero or drop to continue without its scores",
        ) from None
    return pause


async def _try(
    server: JudgeServer, body: dict[str, Any], client: httpx2.AsyncClient, key: str
) -> tuple[str, int]:
    """Send the request once; return the text of the answer and the number of tokens."""
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    address = f"{server.url.rstrip('/')}/chat/completions"
    raw = bytearray()
    try:
        async with (
            asyncio.timeout(server.timeout),
            client.stream("POST", address, json=body, headers=headers) as response,
        ):
            async for part in response.aiter_bytes():
                raw += part
                if len(raw) > LARGEST_ANSWER:
                    raise _Refused(f"the answer is larger than {LARGEST_ANSWER >> 20} MiB", final=True)
    except (httpx2.HTTPError, TimeoutError) as error:
        problem = str(error) or f"no answer in {server.timeout:g} s"
        raise _Refused(f"{type(error).__name__}: {problem}") from None
    text = raw.decode(errors="replace")
    text = text.replace(key, "[key]") if key else text
    if response.status_code != 200:
        final = response.status_code < 500 and response.status_code not in PASSING
        problem = f"status {response.status_code}: {text[:200]!r}"
        raise _Refused(problem, _seconds(response.headers.get("Retry-After")), final)
    return _read(text)


def _read(text: str) -> tuple[str, int]:
    """Return the text and the number of tokens of a chat completion."""
    try:
        answer = parse_json(text)
        words = answer["choices"][0]["message"]["content"]
        tokens = (answer.get("usage") or {}).get("total_tokens") or 0
        if isinstance(words, str):
            return words, tokens if isinstance(tokens, int) else 0
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        pass
    raise _Refused(f"the reply is not a chat completion: {text[:200]!r}")


def _seconds(after: str | None) -> float | None:
    """Return the seconds in a Retry-After header (a number or a date); None for any other text."""
    try:
        wait = float(after or "nan")
    except ValueError:
        try:
            wait = parsedate_to_datetime(str(after)).timestamp() - time.time()
        except ValueError:
            return None
    return None if wait != wait else max(0.0, wait)


_CLIENTS: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient] = WeakKeyDictionary()


def _client() -> httpx2.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _CLIENTS:
        _CLIENTS[loop] = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))
    return _CLIENTS[loop]


@asynccontextmanager
async def _turn(server: JudgeServer) -> AsyncIterator[None]:
    """Wait until the limits allow another request, which runs inside the block."""
    server.answers.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        for place in random.sample(range(server.concurrent), server.concurrent):
            with _locked(server.answers / f"turn-{place}", wait=False) as got:
                if got:
                    await asyncio.sleep(_delay(server))
                    yield
                    return
        await asyncio.sleep(POLL_SECONDS * random.uniform(0.5, 1.5))


def _delay(server: JudgeServer) -> float:
    """Reserve the next request that `per_minute` allows, and return the seconds until then."""
    if server.per_minute is None:
        return 0.0
    gap, now = 60.0 / server.per_minute, time.time()
    with _locked(server.answers / "next", wait=True) as file:
        assert file is not None
        try:
            then = float(file.read())
        except ValueError:  # this is the first request
            then = now
        then = min(max(then, now), now + gap * server.concurrent)  # also correct if the clock was changed
        file.seek(0)
        file.truncate()
        file.write(repr(then + gap))
    return then - now


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[IO[str] | None]:
    """Open and lock a file; yield None if another process has the lock and `wait` is False."""
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
            return
        file.seek(0)
        yield file
