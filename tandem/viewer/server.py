"""A web server for one user on this machine.

The server listens only on the loopback address, needs a token in the address, and answers only GET.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from mimetypes import MimeTypes
from pathlib import Path
from typing import Any

from tandem.errors import TandemError
from tandem.observability.terminal import warn
from tandem.viewer.api import Api, Download
from tandem.viewer.query import Query

_PAGE = Path(__file__).parent / "static"
LOOPBACK = "127.0.0.1"
CONNECTIONS = 64
"""The maximum number of open connections.

For another connection, the longest idle connection is closed, or else the oldest connection.
"""
HEAD_S = 10.0  # seconds in which a request's head must arrive, and for which a connection may be idle
SEND_S = 60.0  # seconds in which the reader must take an answer, or a piece of a download
ANSWER_BYTES = 16 << 20  # most bytes of an answer; downloads have no limit, they are sent piece by piece
_HOSTS = (LOOPBACK, "localhost", "[::1]")
_KINDS = MimeTypes()
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """The server of the page and its data.

    Args:
        api: answers the page's requests.
        port: the port. 0: any free port.

    Attributes:
        files: a dict from name to content of the page's files. An address is never used as a path.
        routes: a dict from name to the function that answers the request.
        url: the page's address, with the token.

    Raises:
        OSError: the port is in use.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, api: Api, port: int = 0) -> None:
        self._connections: dict[Any, tuple[bool, float]] = {}  # whether it is being answered, and since when
        self._lock = threading.Lock()
        super().__init__((LOOPBACK, port), Handler)
        self.api = api
        self.routes = {f"api/{name}": route for name, route in api.routes.items()}
        self.token = secrets.token_urlsafe(24)
        page = [path for path in _PAGE.rglob("*") if path.is_file()]
        self.files = {path.relative_to(_PAGE).as_posix(): path.read_bytes() for path in page}
        self.url = f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Accept a connection. If there are too many, close another one."""
        with self._lock:
            if len(self._connections) >= CONNECTIONS:
                self._drop(min(self._connections, key=self._connections.__getitem__))
            self._connections[request] = False, time.monotonic()
        super().process_request(request, client_address)

    def note(self, request: Any, *, answered: bool) -> None:
        """Record that a request's header has arrived, or that its answer has been sent."""
        with self._lock:
            if request in self._connections:
                self._connections[request] = answered, time.monotonic()

    def service_actions(self) -> None:
        """Close the connections that have been idle too long. This is called at least twice a second."""
        now = time.monotonic()
        with self._lock:
            for request, (answered, since) in list(self._connections.items()):
                if not answered and now - since > HEAD_S:
                    self._drop(request)

    def _drop(self, request: Any) -> None:
        """Shut down a connection. Its thread, which waits for it, then closes it."""
        del self._connections[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a warning about an error, unless the connection just ended."""
        error = sys.exception()
        if not isinstance(error, OSError):
            warn(f"{type(error).__name__}: {error}")


class Handler(BaseHTTPRequestHandler):
    """A handler of one connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tandem", ""
    timeout = SEND_S

    def parse_request(self) -> bool:
        found = super().parse_request()
        self.server.note(self.connection, answered=True)
        return found

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.server.note(self.connection, answered=False)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        token, _, name = path.removeprefix("/").partition("/")
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        if "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0":
            self.close_connection = True  # otherwise the body would be read as the next request
            self._refuse(HTTPStatus.BAD_REQUEST, "a request must not have a body")
        elif host not in _HOSTS:  # the name of another site
            self._refuse(HTTPStatus.FORBIDDEN, f"the page can only be opened as {LOOPBACK} or localhost")
        elif not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN,
                "the token is missing from the address; open the whole address that `tandem view` prints",
            )
        elif (route := self.server.routes.get(name)) is not None:
            self._answer(name, route, query)
        elif (content := self.server.files.get(name or "index.html")) is not None:
            kind = _KINDS.guess_type(name or "index.html")[0] or "text/plain"
            self._send(HTTPStatus.OK, f"{kind}; charset=utf-8", content)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")

    def _answer(self, name: str, route: Callable[[Query], Any], query: str) -> None:
        try:
            found = route(Query(query))
            if isinstance(found, Download):
                self._download(found)
            else:
                self._send_json(HTTPStatus.OK, found)
        except ConnectionError:  # the reader has closed the connection
            self.close_connection = True
        except TandemError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:  # a folder may hold anything, so report the error and go on
            warn(f"{name}: {type(error).__name__}: {error}")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}"[:1000])

    def _download(self, found: Download) -> None:
        how = {"Content-Disposition": f'attachment; filename="{found.name}"', "Connection": "close"}
        self._head(HTTPStatus.OK, f"{found.kind}; charset=utf-8", how)
        try:
            for piece in found.pieces:
                self.wfile.write(piece.encode(errors="backslashreplace"))
        except (TandemError, OSError, ValueError) as error:  # too late for an error status: the file ends
            warn(f"export: {error}")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send_json(status, {"error": why})

    def _send_json(self, status: HTTPStatus, found: Any) -> None:
        content = json.dumps(found, allow_nan=False).encode()
        if len(content) > ANSWER_BYTES:
            why = f"the answer has {len(content):,} bytes, at most {ANSWER_BYTES:,} are allowed; ask for less"
            self._refuse(HTTPStatus.BAD_REQUEST, why)
        else:
            self._send(status, "application/json", content)

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self._head(status, kind, {"Content-Length": str(len(content))})
        self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str, more: Mapping[str, str]) -> None:
        self.send_response(status)
        for header, value in {"Content-Type": kind, **_HEADERS, **more}.items():
            self.send_header(header, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Do nothing, because requests are not logged."""
