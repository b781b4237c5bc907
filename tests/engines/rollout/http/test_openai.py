"""Tests of the engine on OpenAI-compatible servers.

They also cover what all engines on servers share: limits, retries, failures, aborts.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tandem.engines.rollout.base import RolloutEngine, finished, generate
from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http import connection
from tandem.engines.rollout.http.answer import non_default
from tandem.engines.rollout.http.connection import Refused, Server, ServerLost
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.errors import EngineError
from tandem.protocol import Request, SamplingParams
from tests.engines.rollout.http import fakes
from tests.engines.rollout.http.fakes import FakeOpenAI, scripted


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(connection, "_PAUSES_S", (0.01, 0.02, 0.04))


@pytest.fixture
def server():
    with FakeOpenAI() as fake:
        yield fake


@pytest.fixture
def make():
    made = []

    def build(fake, **options):
        limits = {name: options.pop(name) for name in list(options) if name not in ("max_num_seqs", "log")}
        made.append(OpenAIEngine(Server(fake.url, **limits), max_length=256, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def requests(count, **params):
    params = SamplingParams(**{"max_tokens": 20, **params})
    return [Request(f"p{i // 2}", i % 2, np.arange(1, 5 + i // 2), params) for i in range(count)]


def expected(request):
    script = scripted(request.prompt_ids.tolist(), {"seed": seed_of(request)})
    return [next(script) for _ in range(request.params.max_tokens)]


def check(requests, samples):
    assert [sample.id for sample in samples] == [request.id for request in requests]
    for request, sample in zip(requests, samples, strict=True):
        written = expected(request)
        assert sample.token_ids.tolist() == [token for token, _, _ in written]
        assert sample.token_ids.dtype == np.int64
        np.testing.assert_array_equal(sample.log_probs, np.float32([value for _, value, _ in written]))
        np.testing.assert_array_equal(sample.untruncated_log_probs, sample.log_probs)
        assert sample.versions.tolist() == [0] * len(written)
        assert sample.finish_reason == "length"


def test_samples(server, make):
    server.pause_s = 0.002
    engine = make(server, max_num_seqs=3)
    assert isinstance(engine, RolloutEngine)
    wanted = requests(10)
    check(wanted, generate(engine, wanted))
    assert engine.pending() == 0
    assert engine.progress() == 200
    stats = engine.stats()
    assert (stats["generated_tokens"], stats["prefill_tokens"]) == (
        200,
        sum(len(r.prompt_ids) for r in wanted),
    )
    assert server.most == stats["peak_running"] == 3
    assert not any(engine.stats().values())


def test_the_whole_request_on_the_wire(server, make):
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        max_tokens=4,
        stop_token_ids=(3, 4),
        stop=("end",),
        seed=9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        min_tokens=2,
        logit_bias=((7, 1.5), (8, -2.0)),
    )
    request = Request("u", 1, np.array([5, 6, 7]), params)
    engine = make(server, model="tiny", api_key="secret")
    generate(engine, [request])
    body = server.bodies("/v1/completions")[-1]
    assert body.pop("request_id").startswith("tandem-")
    assert body == {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "min_tokens": 2,
        "logit_bias": {"7": 1.5, "8": -2.0},
        "stop_token_ids": [3, 4],
        "stop": ["end"],
        "seed": seed_of(request),
        "ignore_eos": True,
        "stream": True,
        "stream_interval": 16,
        "logprobs": 0,
        "return_token_ids": True,
    }


def test_every_parameter_is_asked_for_unless_it_changes_nothing():
    assert non_default(SamplingParams(top_k=0)) == {}
    assert non_default(SamplingParams(temperature=0.5, min_tokens=3)) == {"temperature": 0.5, "min_tokens": 3}


def test_seeds_differ_by_key_and_fit():
    base = requests(1)[0]
    others = [
        Request("other", 0, base.prompt_ids, base.params),
        Request("p0", 1, base.prompt_ids, base.params),
        Request("p0", 0, base.prompt_ids, SamplingParams(seed=1)),
        Request("p0", 0, base.prompt_ids, base.params, first_position=3),
    ]
    seeds = {seed_of(request) for request in (base, *others)}
    assert len(seeds) == 5
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_stop_token_ends_a_response(server, make):
    (plain,) = requests(1)
    stop = expected(plain)[6][0]
    request = Request("p0", 0, plain.prompt_ids, SamplingParams(max_tokens=20, stop_token_ids=(stop,)))
    (sample,) = generate(make(server), [request])
    assert sample.finish_reason == "stop"
    assert sample.token_ids.tolist() == [token for token, _, _ in expected(plain)[:7]]


def test_a_server_without_a_schema_is_asked_for_standard_parameters_only(server, make):
    server.published = False
    engine = make(server)
    wanted = requests(2)
    check(wanted, generate(engine, wanted))
    with pytest.raises(EngineError, match="does not support") as caught:
        engine.submit(requests(1, top_k=5))
    assert (caught.value.field, caught.value.got) == ("top_k", 5)
    assert engine.pending() == 0


@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"top_k": 3}, {"presence_penalty": 1.0}])
def test_raw_log_probs_are_refused_where_they_differ(server, make, params):
    server.mode = "raw_logprobs"
    engine = make(server)
    wanted = requests(2)
    check(wanted, generate(engine, wanted))
    assert len(generate(engine, requests(2, temperature=0.0))) == 2
    with pytest.raises(EngineError, match="another distribution"):
        engine.submit(requests(1, **params))


@pytest.mark.parametrize("models", [(), ("one", "two")])
def test_the_model_must_be_clear(server, make, models):
    server.models = models
    with pytest.raises(EngineError, match="exactly one model"):
        make(server).submit(requests(1))
    if models:
        assert len(generate(make(server, model="two"), requests(1))) == 1


@pytest.mark.parametrize(
    ("fault", "kind", "message", "got"),
    [
        ("token_ids", EngineError, "token ids", "/v1/completions"),
        ("logprobs", EngineError, "log-probs", "/v1/completions"),
        ("echo", EngineError, "token 2 differs", "4, 4 tokens in all"),
        ("error", EngineError, "reported an error", "out of memory"),
        ("garbage", EngineError, "not JSON", "{oops"),
        ("other stop", EngineError, "stop tokens", "finish reason 'stop'"),
        ("short", ServerLost, "ended before", "1 tokens"),
        ("drop", ServerLost, "broke during the answer", "RemoteProtocolError"),
        ("500", ServerLost, "refused", '500 {"error": "500 as planned"}'),
        ("400", Refused, "refused", '400 {"error": "400 as planned"}'),
    ],
)
def test_a_failure_is_reported_once_and_names_server_and_request(server, make, fault, kind, message, got):
    engine = make(server, max_num_seqs=1)
    engine.submit([])  # connects
    server.faults.append(fault)
    wanted = requests(3)
    engine.submit(wanted)
    with pytest.raises(EngineError, match=message) as caught:
        engine.poll(5.0)
    error = caught.value
    assert type(error) is kind
    assert server.url in str(error.got) and got in str(error.got)
    assert "('p0', 0)" in str(error.field)
    assert engine.pending() == 2
    rest = []
    while engine.pending():
        rest += engine.poll(5.0)
    check(wanted[1:], sorted(rest, key=lambda sample: sample.id))
    assert len(server.bodies("/v1/completions")) == 4


@pytest.mark.parametrize("fault", ["429", "503", "hang up"])
def test_a_request_that_has_not_begun_is_tried_again(server, make, fault):
    engine = make(server)
    engine.submit([])  # connects
    server.faults.extend([fault] * 3)
    wanted = requests(1)
    check(wanted, generate(engine, wanted))
    assert len(server.bodies("/v1/completions")) == 5
    assert engine.progress() == 20


def test_tries_have_an_end(server, make):
    engine = make(server)
    engine.submit([])  # connects
    server.faults.extend(["429"] * 4)
    with pytest.raises(ServerLost, match="refused"):
        generate(engine, requests(1))


def test_nobody_listens(make, server):
    url = server.url
    server.close()
    engine = make(server, connect_timeout_s=1.0)
    with pytest.raises(ServerLost, match="cannot connect") as caught:
        engine.submit(requests(1))
    assert url in caught.value.got
    assert engine.pending() == 0


def test_no_answer_in_time(server, make):
    engine = make(server, request_timeout_s=0.3)
    engine.submit([])  # connects
    server.faults.append("hang")
    began = time.monotonic()
    with pytest.raises(ServerLost, match=r"in 0\.3 s"):
        generate(engine, requests(1))
    assert time.monotonic() - began < 3


def test_waiting_for_a_slot_is_not_counted(make):
    with FakeOpenAI(pause_s=0.01) as server:
        wanted = requests(6, max_tokens=10)
        check(wanted, generate(make(server, max_num_seqs=1, request_timeout_s=0.5), wanted))


def test_samples_come_before_the_failure(server, make):
    engine = make(server, max_num_seqs=1)
    engine.submit([])  # connects
    server.faults.extend(["", "400"])
    wanted = requests(3)
    engine.submit(wanted)
    until = time.monotonic() + 5
    while len(server.bodies("/v1/completions")) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    check(wanted[:1], engine.poll(1.0))
    with pytest.raises(EngineError, match="refused"):
        engine.poll(1.0)
    check(wanted[2:], engine.poll(1.0))


def test_abort_closes_the_connection_and_keeps_what_is_written(make):
    with FakeOpenAI(pause_s=0.02) as server:
        engine = make(server)
        wanted = requests(4, max_tokens=200)
        engine.submit(wanted)
        while engine.progress() < 20:
            assert engine.poll(0.02) == []
        partial = engine.abort([request.id for request in wanted[:3]], keep_partial=True)
        for request, sample in zip(wanted, partial, strict=False):
            assert sample.finish_reason == "abort" and 0 < len(sample.token_ids) < 200
            assert sample.token_ids.tolist() == [t for t, _, _ in expected(request)[: len(sample.token_ids)]]
            assert len(sample.log_probs) == len(sample.versions) == len(sample.token_ids)
        assert engine.pending() == 1
        assert engine.abort([request.id for request in wanted]) == []
        until = time.monotonic() + 5
        while len(server.cut_off) < 4 and time.monotonic() < until:
            time.sleep(0.02)
        assert server.cut_off == ["/v1/completions"] * 4
        assert engine.poll(0.05) == []
        engine.submit(wanted[:1])  # the id of an aborted request may be used again
        assert engine.pending() == 1


def test_a_finished_sample_that_is_aborted_is_gone(server, make):
    engine = make(server)
    (request,) = wanted = requests(1)
    engine.submit(wanted)
    while engine.progress() < 20:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(engine.abort([request.id], keep_partial=True)[0].token_ids) == 20
    check(wanted, generate(engine, wanted))


def test_a_stream_left_early_ends_its_requests(make):
    with FakeOpenAI(pause_s=0.005) as server:
        engine = make(server)
        parts = finished(engine, requests(8, max_tokens=100))
        next(parts)
        parts.close()
        assert engine.pending() == 0


def test_refused_requests_leave_nothing_behind(server, make):
    engine = make(server)
    wanted = requests(2)
    for bad in (
        [*wanted, wanted[0]],
        [*wanted, Request("e", 0, np.array([], dtype=np.int64), SamplingParams())],
        [*wanted, Request("l", 0, np.ones(250, dtype=np.int64), SamplingParams())],
    ):
        with pytest.raises(EngineError):
            engine.submit(bad)
        assert engine.pending() == 0


def test_weights_cannot_be_changed_and_memory_is_left_alone(server, make):
    engine = make(server)
    assert engine.takes == frozenset()
    with pytest.raises(EngineError, match="cannot give its server new weights"):
        engine.update_weights(None, 1)
    engine.submit(requests(1))
    with pytest.raises(EngineError, match="pending"):
        engine.sleep()
    while engine.pending():
        engine.poll(1.0)
    engine.sleep()
    engine.wake()
    assert len(generate(engine, requests(1))) == 1


def test_close_ends_the_thread(make):
    with FakeOpenAI(pause_s=0.05) as server:
        before = threading.active_count()
        engine = OpenAIEngine(Server(server.url), max_length=256)
        engine.submit(requests(2, max_tokens=200))
        engine.poll(0.1)
        engine.close()
        engine.close()
        assert [t for t in threading.enumerate() if t.name == f"rollout {server.url}"] == []
        assert threading.active_count() <= before + 2  # the server's own threads, until they end
        with pytest.raises(EngineError, match="closed"):
            engine.submit(requests(1))


def test_log_lines(server, make, monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.counters._LOG_EVERY_S", 0.0)
    lines = []
    generate(make(server, log=lines.append), requests(2))
    assert lines and "tokens/s" in lines[-1]


def test_a_server_that_is_killed(make):
    process = subprocess.Popen([sys.executable, fakes.__file__, "0.02"], stdout=subprocess.PIPE, text=True)
    try:
        engine = OpenAIEngine(Server(process.stdout.readline().strip()), max_length=256)
        engine.submit(requests(2, max_tokens=200))
        while engine.progress() < 10:
            engine.poll(0.02)
        process.kill()
        with pytest.raises(ServerLost, match="broke during the answer"):
            engine.poll(5.0)
        engine.close()
    finally:
        process.kill()
        process.wait(10)
