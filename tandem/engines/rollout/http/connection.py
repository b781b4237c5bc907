"""The HTTP side of an engine on a server: one background thread with an event loop and a client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2

from tandem.errors import EngineError
from tandem.texts import parse_json

T = TypeVar("T")

_PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)  # before each further try of a request that has not begun
_BUSY = (429, 503)
_CUT = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError)
_IDLE_S = 2.0
"""How long a connection nobody uses is kept. Servers close theirs, most after 5 s, and a request that is just
then on its way is lost."""
CLOSING_S = 10.0
"""For what ends something: a server that hangs is not waited for."""


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server and its time limits.

    Attributes:
        url: scheme, host and port: `http://host:8000`.
        connect_timeout_s: until a connection stands.
        request_timeout_s: from the start of one request to the end of its answer.
        model: the name it serves the model under; None: its only one.
        api_key: sent as a bearer token.
    """

    url: str
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 1800.0
    model: str | None = None
    api_key: str | None = None


class ServerLost(EngineError):
    """The server cannot be reached, does not answer in time, or breaks off."""


class Refused(EngineError):
    """The server will not have a request, and no other of its kind would.

    Attributes:
        request: which, where it was one for a response.
    """

    request: tuple[str, int] | None = None


class Connection:
    """All requests to one server.

    Args:
        kept: connections that stay open between requests, at most.
    """

    def __init__(self, server: Server, *, kept: int) -> None:
        self.server = server
        self.loop = asyncio.new_event_loop()
        self._client = httpx2.AsyncClient(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.api_key}"} if server.api_key else None,
            timeout=httpx2.Timeout(None, connect=server.connect_timeout_s),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=kept, keepalive_expiry=_IDLE_S
            ),
            trust_env=not is_local(server.url),
        )
        self._thread = threading.Thread(
            target=self.loop.run_forever, name=f"rollout {server.url}", daemon=True
        )
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self.loop.is_closed()

    def close(self) -> None:
        """Ends the thread; idempotent."""
        if self.closed:
            return
        self.wait(self._client.aclose(), CLOSING_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSING_S)
        self.loop.close()

    def wait(self, work: Coroutine[Any, Any, T], limit_s: float | None = None) -> T:
        """The result of `work`, done in the background thread.

        Raises:
            ServerLost: not done within `limit_s`; None: the server's `request_timeout_s`.
        """
        return self.begin(work, limit_s).result()

    def begin(self, work: Coroutine[Any, Any, T], limit_s: float | None = None) -> Future[T]:
        """Starts `work` in the background thread; the future has the result of `wait`."""
        limit_s = self.server.request_timeout_s if limit_s is None else limit_s
        return asyncio.run_coroutine_threadsafe(self._limited(work, limit_s), self.loop)

    async def _limited(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        try:
            return await asyncio.wait_for(work, limit_s)
        except TimeoutError:
            raise ServerLost(f"no answer in {limit_s:g} s", got=self.server.url) from None

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """The server's answer to one request: its JSON, or its text.

        Args:
            options: those of `httpx2.AsyncClient.request`, such as json and params.

        Raises:
            ServerLost: no connection, or the server cannot answer now.
            Refused: a status of 4xx.
        """
        try:
            try:
                response = await self._client.request(method, path, **options)
            except _CUT:  # a kept connection that the server has closed; all that is asked may be asked again
                response = await self._client.request(method, path, **options)
        except httpx2.TransportError as error:
            raise ServerLost("no connection", got=f"{self.server.url}{path}: {_said(error)}") from error
        if not response.is_success:
            raise self._refused(path, response)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json and response.content else response.text

    async def events(
        self, path: str, body: dict[str, Any], *, streams: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The parts of the answer to a POST.

        A request whose connection fails, or which the server is too busy for (429, 503), is tried again
        with growing pauses as long as no answer has begun.

        Args:
            streams: whether the answer is a stream of events; else it is one JSON object.

        Raises:
            ServerLost: no connection, one that broke during the answer, or a server that cannot answer now.
            Refused: a status of 4xx.
            EngineError: something else than JSON.
        """
        for pause in (*_PAUSES_S, None):
            began = False
            try:
                async with self._client.stream("POST", path, json=body) as response:
                    began = response.is_success
                    if began:
                        async with aclosing(self._parts(response, streams)) as parts:
                            async for part in parts:
                                yield part
                        return
                    await response.aread()
                if response.status_code not in _BUSY or pause is None:
                    raise self._refused(path, response)
            except httpx2.TransportError as error:
                if began or pause is None:
                    what = "the connection broke during the answer" if began else "no connection"
                    raise ServerLost(what, got=f"{self.server.url}{path}: {_said(error)}") from error
            await asyncio.sleep(pause)

    async def _parts(self, response: httpx2.Response, streams: bool) -> AsyncGenerator[dict[str, Any], None]:
        try:
            if not streams:
                yield parse_json(await response.aread())
                return
            async for event in httpx2.EventSource(response, max_event_size=None):
                if event.data != "[DONE]":
                    yield parse_json(event.data)
        except json.JSONDecodeError as error:
            raise EngineError("the answer is no JSON", got=f"{response.url}: {error.doc[:300]}") from error

    def _refused(self, path: str, response: httpx2.Response) -> EngineError:
        lines = response.text.strip().splitlines()
        said = lines[0][:300] if lines else response.reason_phrase
        lost = response.is_server_error or response.status_code in (408, *_BUSY)
        kind = ServerLost if lost else Refused
        return kind("the server refused", got=f"{self.server.url}{path}: {response.status_code} {said}")


def is_local(url: str) -> bool:
    """Whether the address is one of this machine's to itself, which no proxy can reach."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
