"""Programs run on a server: a real HTTP server that speaks SandboxFusion's protocol and may fail."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tandem import sandbox
from tandem.config.rewards import SandboxConfig
from tandem.errors import RewardError
from tandem.rewards.programs import check_sources, compute_score, place_programs
from tandem.sandbox import Limits, remote

DOUBLE = "```python\nprint(2 * int(input()))\n```"


class Server(ThreadingHTTPServer):
    """A server that runs programs directly, without any protection.

    Attributes:
        asked: the requests so far.
        failing: how many of the next requests are answered with `status`, or with the text `body`.
        most: the highest number of simultaneous requests.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.failing, self.status, self.body = 0, 503, "busy"
        self.now, self.most, self.lock = 0, 0, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(asked | {"path": self.path})
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            fails = self.server.failing > 0
            self.server.failing -= fails
        status, body = (self.server.status, self.server.body) if fails else (200, json.dumps(answer(asked)))
        with self.server.lock:
            self.server.now -= 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *words: Any) -> None:
        pass


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", asked["code"]],
            input=asked["stdin"],
            capture_output=True,
            text=True,
            timeout=asked["run_timeout"],
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {
            "status": "Failed",
            "message": "",
            "run_result": {"status": "TimeLimitExceeded", "stdout": ""},
        }
    result = {
        "status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr,
    }  # fmt: skip
    return {"status": "Failed" if done.returncode else "Success", "message": "", "run_result": result}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)
    made = Server()
    yield made
    made.shutdown()
    made.server_close()
    sandbox.use(sandbox.Place())


def test_a_request_and_its_answers(server: Server) -> None:
    limits = Limits(3.0, 512)
    assert remote.run("print(input())", "hé", limits, server.url).stdout == "hé\n"
    asked = server.asked[0]
    assert asked["path"] == "/run_code" and asked["language"] == "python" and asked["stdin"] == "hé"
    assert (asked["run_timeout"], asked["memory_limit_MB"]) == (3.0, 512)
    assert remote.run("1 / 0", "", limits, f"{server.url}/run_code").status == "error"
    assert remote.run("while True: pass", "", Limits(0.5), server.url).status == "timeout"
    assert [each["path"] for each in server.asked] == ["/run_code"] * 3


@pytest.mark.parametrize(("status", "body", "tries"), [
    (503, "busy", 4), (200, '{"status": "SandboxError"}', 4), (200, "[]", 4), (200, "<html>", 4),
    (404, "no", 1),
])  # fmt: skip
def test_a_server_that_fails(server: Server, status: int, body: str, tries: int) -> None:
    server.status, server.body, server.failing = status, body, 99
    with pytest.raises(RewardError, match=r"reward\.sandbox\.url: .*server"):
        remote.run("print(1)", "", Limits(), server.url)
    assert len(server.asked) == tries


def test_a_busy_server_is_asked_again(server: Server) -> None:
    server.failing = 3
    assert remote.run("print(1)", "", Limits(), server.url).stdout == "1\n"


def test_no_server() -> None:
    begin = time.monotonic()
    with pytest.raises(RewardError, match="ConnectError"):
        remote.run("print(1)", "", Limits(), "http://127.0.0.1:9")
    assert time.monotonic() - begin < 30


def test_solutions_are_scored_there(server: Server) -> None:
    said: list[str] = []
    config = SandboxConfig(url=server.url, max_concurrent=9)
    check_sources(["apps"], None, config, said.append)
    assert said == [f"programs that answer apps run on {server.url}"]
    place_programs(config, 4)
    assert sandbox.place().at_once == 2
    numbers = {"inputs": [str(n) for n in range(8)], "outputs": [str(2 * n) for n in range(7)] + ["x"]}
    assert compute_score("apps", DOUBLE, numbers)["score"] == 7 / 8
    assert 1 <= server.most <= 2
    called = {"fn_name": "square", "inputs": ["3"], "outputs": ["9"]}
    assert compute_score("apps", "```python\ndef square(n): return n * n\n```", called)["score"] == 1
