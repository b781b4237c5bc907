"""Tests of the connection to a server: proxies, temporary errors, and failures that no call asked for."""

from __future__ import annotations

import time

import pytest

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.http import connection
from tandem.engines.rollout.http.connection import Server, ServerLost, is_local
from tests.engines.rollout.http.fakes import Reply
from tests.engines.rollout.http.test_openai import check, make, requests, server

__all__ = ["make", "server"]


def test_a_failure_that_was_not_told_is_dropped_with_its_request(server, make):
    engine = make(server, max_num_seqs=1)
    engine.submit([])  # connects
    server.faults.extend(["", "400"])
    wanted = requests(2)
    engine.submit(wanted)
    until = time.monotonic() + 5
    while len(server.bodies("/v1/completions")) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    check(wanted[:1], engine.poll(1.0))
    engine.abort([request.id for request in wanted])
    check(wanted, generate(engine, wanted))


def test_a_schema_that_cannot_be_read_now_is_not_taken_for_none(server, make):
    answer = server.answer
    server.answer = lambda path, *rest: Reply({}, 503) if path == "/openapi.json" else answer(path, *rest)
    engine = make(server)
    with pytest.raises(ServerLost, match="refused"):
        engine.submit([])
    server.answer = answer
    assert len(generate(engine, requests(1, min_p=0.1))) == 1  # a parameter outside OpenAI's own


def test_a_connection_is_not_used_when_the_server_may_be_closing_it(server, monkeypatch):
    assert connection._IDLE_S < 5.0  # uvicorn's timeout, which vLLM and SGLang use too
    monkeypatch.setattr(connection, "_IDLE_S", 0.3)
    ports, respond = [], server.respond

    def noted(path, body, handler):
        ports.append(handler.client_address[1])
        respond(path, body, handler)

    server.respond = noted
    made = connection.Connection(Server(server.url), kept=4)
    for pause_s in (0.0, 0.0, 0.6):
        time.sleep(pause_s)
        made.wait(made.ask("GET", "/v1/models"))
    made.close()
    assert ports[0] == ports[1] != ports[2]


def test_what_was_asked_on_a_connection_that_was_cut_is_asked_again(server):
    respond, cut = server.respond, []

    def once(path, body, handler):
        if cut:
            respond(path, body, handler)
        else:
            cut.append(path)
            handler.hang_up()

    made = connection.Connection(Server(server.url), kept=4)
    made.wait(made.ask("GET", "/v1/models"))
    server.respond = once
    assert made.wait(made.ask("GET", "/v1/models"))["data"]
    server.respond = lambda path, body, handler: handler.hang_up()
    with pytest.raises(ServerLost, match="cannot connect"):
        made.wait(made.ask("GET", "/v1/models"))
    made.close()
    assert cut == ["/v1/models"]


def test_no_proxy_is_asked_for_a_server_on_this_machine(server, make, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    wanted = requests(2)
    check(wanted, generate(make(server), wanted))


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.8.0.1", True),
        ("http://localhost:8000/x", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.1:8000", False),
        ("https://gpu.example:8000", False),
    ],
)
def test_which_addresses_are_this_machine_s_to_itself(url, local):
    assert is_local(url) is local
