"""The HTTP connection of a rollout engine: a background thread with an event loop and an HTTP client."""

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

_PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0)  # before retries of a request whose answer has not begun
_BUSY = (429, 503)
_CUT = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError)
_IDLE_S = 2.0
"""How long an unused connection is kept open, in seconds.

Most servers close unused connections after 5 s. A request that is sent at that moment is lost.
"""
CLOSING_S = 10.0
"""The time limit, in seconds, for cancelling requests and closing, in case the server hangs."""


@dataclass(frozen=True, slots=True)
class Server:
    """The address of an inference server and the time limits for requests.

    Attributes:
        url: Scheme, host and port, such as `http://host:8000`.
        connect_timeout_s: The time limit to open a connection.
        request_timeout_s: The time limit from the start of one request to the end of its answer.
        model: The name under which the server serves the model. None means the server's only model.
        api_key: The bearer token. None means that no token is sent.
    """

    url: str
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 1800.0
    model: str | None = None
    api_key: str | None = None


class ServerLost(EngineError):
    """The error when a server cannot be reached, does not answer in time, or closes the connection."""


class Refused(EngineError):
    """The error when a server refuses a request. Other replicas would refuse this request too.

    Attributes:
        request: The id of the refused rollout request. None for other calls.
    """

    request: tuple[str, int] | None = None


class Connection:
    """The connection that sends all requests to one server.

    Args:
        server: The server.
        kept: The maximum number of connections that stay open between requests.
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
        """Stop the thread. Further calls do nothing."""
        if self.closed:
            return
        self.wait(self._client.aclose(), CLOSING_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSING_S)
        self.loop.close()

    def wait(self, work: Coroutine[Any, Any, T], limit_s: float | None = None) -> T:
        """Run a coroutine in the background thread and return its result.

        Args:
            work: The coroutine.
            limit_s: The time limit. None means the server's `request_timeout_s`.

        Raises:
            ServerLost: The coroutine did not finish within the time limit.
        """
        return self.begin(work, limit_s).result()

    def begin(self, work: Coroutine[Any, Any, T], limit_s: float | None = None) -> Future[T]:
        """Start a coroutine in the background thread. The future has the result that `wait` would return."""
        limit_s = self.server.request_timeout_s if limit_s is None else limit_s
        return asyncio.run_coroutine_threadsafe(self._limited(work, limit_s), self.loop)

    async def _limited(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        try:
            return await asyncio.wait_for(work, limit_s)
        except TimeoutError:
            raise ServerLost(f"the server did not answer in {limit_s:g} s", got=self.server.url) from None

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Send one request and return the server's answer: the parsed JSON, or the text if it is not JSON.

        Args:
            method: The HTTP method.
            path: The path on the server.
            options: Options of `httpx2.AsyncClient.request`, such as json and params.

        Raises:
            ServerLost: There is no connection, or the server cannot answer now.
            Refused: The server answered with a status of 4xx.
        """
        try:
            try:
                response = await self._client.request(method, path, **options)
            except _CUT:  # the server has closed an idle connection; every request here may be repeated
                response = await self._client.request(method, path, **options)
        except httpx2.TransportError as error:
            raise ServerLost(
                "cannot connect to the server", got=f"{self.server.url}{path}: {_describe_error(error)}"
            ) from error
        if not response.is_success:
            raise self._refused(path, response)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json and response.content else response.text

    async def events(
        self, path: str, body: dict[str, Any], *, streams: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Send a POST request and yield the events of the answer.

        If the connection fails, or the server is too busy (429, 503), the request is retried with growing
        pauses, as long as no answer has begun.

        Args:
            path: The path on the server.
            body: The JSON of the request.
            streams: Whether the answer is a stream of events. Otherwise the answer is one JSON object.

        Raises:
            ServerLost: There is no connection, the connection broke during the answer, or the server cannot
                answer now.
            Refused: The server answered with a status of 4xx.
            EngineError: The answer is not JSON.
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
                    what = (
                        "the connection broke during the answer" if began else "cannot connect to the server"
                    )
                    raise ServerLost(
                        what, got=f"{self.server.url}{path}: {_describe_error(error)}"
                    ) from error
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
            raise EngineError(
                "the server's answer is not JSON", got=f"{response.url}: {error.doc[:300]}"
            ) from error

    def _refused(self, path: str, response: httpx2.Response) -> EngineError:
        lines = response.text.strip().splitlines()
        first_line = lines[0][:300] if lines else response.reason_phrase
        lost = response.is_server_error or response.status_code in (408, *_BUSY)
        kind = ServerLost if lost else Refused
        return kind(
            "the server refused the request",
            got=f"{self.server.url}{path}: {response.status_code} {first_line}",
        )


def is_local(url: str) -> bool:
    """Return whether the address is this machine's loopback address, which no proxy can reach."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
