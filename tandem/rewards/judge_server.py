"""Questions to a server that speaks OpenAI's chat completions, within its limits, each paid for once.

The limits hold for all processes of a machine that ask the same address: they share locks on files beside the
answers, which the system frees when a process dies.
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
LONGEST_WAIT = 120.0  # a server that says to come back later than that is not waited for
POLL_SECONDS = 0.02
LARGEST_ANSWER = 4 * 2**20
PASSING = (408, 409, 425, 429)  # refusals that may pass, beside all from 500 on


@checked_dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", strict=True))
class JudgeServer:
    """Where a judge is, and how it may be asked.

    Attributes:
        url: the address before `/chat/completions`, such as http://127.0.0.1:8000/v1.
        model: its name there.
        api_key_env: the environment variable that holds the key; None: it needs none.
        concurrent: requests at a time, of all processes of this machine.
        per_minute: requests a minute, evenly spaced, of the same; None: any number.
        timeout: seconds for one try.
        tries: of a request that the server refuses for now, or does not answer.
        options: further entries of the request, such as temperature or max_tokens.
        cache: the folder with the answers, and the locks; None: the user's cache.
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
        """Return the server of a mapping of these names.

        Raises:
            RewardError: a name is missing or none of these, or a value is out of its range.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            known = [each.name for each in fields(cls)]
            name = error.errors()[0]["loc"][0]
            raise RewardError(
                "no such entry, or no such value",
                field=f"the judge's server.{name}",
                got=given.get(str(name), "nothing") if name in known else None,
                expected=f"url (http://… or https://…) and model, and any of {', '.join(known[2:])}",
            ) from None

    @property
    def answers(self) -> Path:
        """The folder with this address's answers."""
        users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "judge"
        return Path(self.cache or users).expanduser() / hashlib.sha256(self.url.encode()).hexdigest()[:16]

    @property
    def key(self) -> str:
        """The key, which nothing that is written may hold; "" where none is needed.

        Raises:
            RewardError: the variable is not set, or holds what no header may.
        """
        key = os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""
        if self.api_key_env and not (key and key.isascii() and key.isprintable()):
            raise RewardError(
                "holds other characters than a key has" if key else "is not set",
                field=f"the environment variable {self.api_key_env}",
                remedy="export it before Tandem starts; server.api_key_env names it",
            )
        return key


@dataclass(frozen=True, slots=True)
class Reply:
    """What a judge wrote.

    Attributes:
        text: its words.
        kept: the file that keeps them, once `keep` was called.
        tokens: read and written, as the server counts; 0 where the answer was there already.
        seconds: from the first try to the answer, without the wait for a turn.
        retries: tries that failed.
        cached: whether the answer was there already.
    """

    text: str
    kept: Path
    tokens: int = 0
    seconds: float = 0.0
    retries: int = 0
    cached: bool = False

    def keep(self) -> None:
        """Keep the answer, so that it is paid for once."""
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        new = self.kept.with_suffix(f".{os.getpid()}-{random.getrandbits(48):x}")
        new.write_text(json.dumps({"text": self.text, "tokens": self.tokens}), encoding="utf-8")
        new.replace(self.kept)


class _Refused(Exception):
    """A try that failed.

    Attributes:
        after: seconds that the server says to wait; None where it does not.
        final: whether another try would fail too.
    """

    def __init__(self, problem: str, after: float | None = None, final: bool = False) -> None:
        super().__init__(problem)
        self.after, self.final = after, final


async def ask(server: JudgeServer, messages: list[dict[str, str]]) -> Reply:
    """Return the judge's answer to a chat: as kept, else of the server.

    Raises:
        RewardError: there is none after all tries; the key is missing.
    """
    body = {**server.options, "model": server.model, "messages": messages}
    content = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    kept = server.answers / content[:2] / f"{content}.json"
    try:
        return Reply(parse_json(kept.read_text(encoding="utf-8"))["text"], kept, cached=True)
    except (OSError, ValueError, KeyError, TypeError):  # none, or half of one: it is asked for again
        pass
    key, seconds, tried = server.key, 0.0, 0
    client = _client()  # takes a while once, which is not to eat up the requests' distance
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
    """Return the seconds to the next try.

    Raises:
        RewardError: there is none.
    """
    doubled = min(LONGEST_PAUSE, PAUSE_SECONDS * 2 ** (tried - 1)) * random.uniform(0.75, 1.25)
    pause = doubled if refused.after is None else refused.after
    if refused.final or tried >= server.tries or pause > LONGEST_WAIT:
        later = f", and says to wait {pause:.0f} s" if pause > LONGEST_WAIT else ""
        raise RewardError(
            "the judge gives no answer",
            field=f"the judge {server.model} at {server.url}",
            got=f"{refused}{later} (try {tried} of {server.tries})",
            remedy="look whether the server runs and what it allows: server.concurrent, per_minute, "
            "timeout, tries, api_key_env; reward.on_error=zero or drop goes on without",
        ) from None
    return pause


async def _try(
    server: JudgeServer, body: dict[str, Any], client: httpx2.AsyncClient, key: str
) -> tuple[str, int]:
    """Ask once; return the words and the tokens."""
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
                    raise _Refused("an answer without end", final=True)
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
    """The words and the tokens of a chat completion."""
    try:
        answer = parse_json(text)
        words = answer["choices"][0]["message"]["content"]
        tokens = (answer.get("usage") or {}).get("total_tokens") or 0
        if isinstance(words, str):
            return words, tokens if isinstance(tokens, int) else 0
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        pass
    raise _Refused(f"no chat completion: {text[:200]!r}")


def _seconds(after: str | None) -> float | None:
    """The seconds that a header Retry-After says, as a number or a date; None where it says none."""
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
    """Waits until one more request is within the limits."""
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
    """Seconds to the next request that `per_minute` allows, which is taken."""
    if server.per_minute is None:
        return 0.0
    gap, now = 60.0 / server.per_minute, time.time()
    with _locked(server.answers / "next", wait=True) as file:
        assert file is not None
        try:
            then = float(file.read())
        except ValueError:  # none so far
            then = now
        then = min(max(then, now), now + gap * server.concurrent)  # whatever the clock did
        file.seek(0)
        file.truncate()
        file.write(repr(then + gap))
    return then - now


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[IO[str] | None]:
    """A file that nobody else has meanwhile; None where somebody has and it is not waited for."""
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
            return
        file.seek(0)
        yield file
