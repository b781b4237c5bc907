import time

import pytest

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.http import connection
from tandem.engines.rollout.http.connection import Server, ServerLost, is_local
from tests.engines.rollout.http.fakes import Reply
from tests.engines.rollout.http.test_openai import check, make, requests, server
from tests.support.refusing import refused

__all__ = ["make", "server"]


@pytest.fixture
def ask(server):
    made = connection.Connection(Server(server.url), kept=4)
    yield lambda: made.wait(made.ask("GET", "/v1/models"))
    made.close()


def test_a_schema_that_cannot_be_read_now_is_not_taken_for_none(server, make):
    answer = server.answer
    server.answer = lambda path, *rest: Reply({}, 503) if path == "/openapi.json" else answer(path, *rest)
    engine = make(server, connects=False)
    refused(ServerLost, lambda: engine.submit([]), "refused")
    server.answer = answer
    assert len(generate(engine, requests(1, min_p=0.1))) == 1  # a parameter outside OpenAI's own


def test_a_connection_is_not_used_when_the_server_may_be_closing_it(server, monkeypatch):
    assert connection._IDLE_S < 5.0  # uvicorn's timeout, which vLLM and SGLang use too
    monkeypatch.setattr(connection, "_IDLE_S", 0.3)
    ports, respond = [], server.respond
    server.respond = lambda *args: (ports.append(args[2].client_address[1]), respond(*args))
    made = connection.Connection(Server(server.url), kept=4)
    for pause_s in (0.0, 0.0, 0.6):
        time.sleep(pause_s)
        made.wait(made.ask("GET", "/v1/models"))
    made.close()
    assert ports[0] == ports[1] != ports[2]


def test_what_was_asked_on_a_connection_that_was_cut_is_asked_again(server, ask):
    respond, cut = server.respond, []

    def once(path, body, handler):
        cut.append(path)
        server.respond = respond
        handler.hang_up()

    ask()
    server.respond = once
    assert ask()["data"]
    server.respond = lambda path, body, handler: handler.hang_up()
    refused(ServerLost, ask, "cannot connect")
    assert cut == ["/v1/models"]


def test_no_proxy_is_asked_for_a_server_on_this_machine(server, make, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    wanted = requests(2)
    check(wanted, generate(make(server), wanted))


@pytest.mark.parametrize(("address", "local"), [
    ("http://127.0.0.1:8000", True), ("http://127.8.0.1", True), ("http://localhost:8000/x", True),
    ("http://[::1]:8000", True), ("http://10.0.0.1:8000", False), ("https://gpu.example:8000", False),
])  # fmt: skip
def test_which_addresses_are_this_machine_s_to_itself(address, local):
    assert is_local(address) is local
