"""A real HTTP server that records what it is asked, for clients of judges and of sandboxes."""

import json
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    path: str
    time: float
    headers: dict[str, str]
    body: dict[str, Any]


class AnsweringServer(ThreadingHTTPServer):
    """Answers POST requests with `answer`; `asked` has them, `most` how many there were at a time."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[Asked] = []
        self.now, self.most, self.lock = 0, 0, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        raise AssertionError("a subclass answers")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that stopped waiting."""


class _Handler(BaseHTTPRequestHandler):
    server: AnsweringServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(Asked(self.path, time.monotonic(), dict(self.headers.items()), body))
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        status, headers, sent = self.server.answer(body)
        with self.server.lock:
            self.server.now -= 1
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *words: Any) -> None:
        pass
