import json
import subprocess
import sys
import time

import pytest

from tandem import sandbox
from tandem.config.rewards import SandboxConfig
from tandem.errors import RewardError
from tandem.rewards.programs import check_sources, compute_score, place_programs
from tandem.sandbox import Limits, remote
from tests.support.answering import AnsweringServer
from tests.support.refusing import refused

DOUBLE = "```python\nprint(2 * int(input()))\n```"


class Server(AnsweringServer):
    """Runs programs without any protection; the next `failing` requests get `status` and the text `body`."""

    failing, status, body = 0, 503, "busy"

    def answer(self, body):
        with self.lock:
            fails = self.failing > 0
            self.failing -= fails
        return (
            (self.status, {}, self.body.encode()) if fails else (200, {}, json.dumps(result(body)).encode())
        )


def result(asked):
    command = [sys.executable, "-I", "-S", "-c", asked["code"]]
    told = {"input": asked["stdin"], "timeout": asked["run_timeout"]}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **told)
    except subprocess.TimeoutExpired:
        return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": ""}}
    ended = {
        "status": "Finished",
        "return_code": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }
    return {"status": "Failed" if done.returncode else "Success", "run_result": ended}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)
    made = Server()
    yield made
    made.shutdown()
    made.server_close()
    sandbox.use(sandbox.Place())


def test_a_request_and_its_answers(server):
    limits = Limits(3.0, 512)
    assert remote.run("print(input())", "hé", limits, server.url).stdout == "hé\n"
    asked = server.asked[0].body
    assert asked["language"] == "python" and asked["stdin"] == "hé"
    assert (asked["run_timeout"], asked["memory_limit_MB"]) == (3.0, 512)
    assert remote.run("1 / 0", "", limits, f"{server.url}/run_code").status == "error"
    assert remote.run("while True: pass", "", Limits(0.5), server.url).status == "timeout"
    assert [each.path for each in server.asked] == ["/run_code"] * 3


@pytest.mark.parametrize(("status", "body", "tries"), [
    (503, "busy", 4), (200, '{"status": "SandboxError"}', 4), (200, "[]", 4), (200, "<html>", 4),
    (404, "no", 1),
])  # fmt: skip
def test_a_server_that_fails(server, status, body, tries):
    server.status, server.body, server.failing = status, body, 99
    with pytest.raises(RewardError, match=r"reward\.sandbox\.url: .*server"):
        remote.run("print(1)", "", Limits(), server.url)
    assert len(server.asked) == tries


def test_a_busy_server_is_asked_again_and_one_that_is_absent_is_named(server):
    server.failing = 3
    assert remote.run("print(1)", "", Limits(), server.url).stdout == "1\n"
    begin = time.monotonic()
    refused(RewardError, lambda: remote.run("print(1)", "", Limits(), "http://127.0.0.1:9"), "ConnectError")
    assert time.monotonic() - begin < 30


def test_solutions_are_scored_there(server):
    said = []
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
