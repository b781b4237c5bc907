import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tandem.engines.rollout.base import RolloutEngine, generate
from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http import connection
from tandem.engines.rollout.http.answer import non_default
from tandem.engines.rollout.http.connection import Refused, Server, ServerLost
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.errors import EngineError
from tandem.protocol import SamplingParams
from tests.engines.rollout.case import drain, request, wait_for, write
from tests.engines.rollout.http import fakes
from tests.engines.rollout.http.fakes import FakeOpenAI, scripted
from tests.support.refusing import refused


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(connection, "_PAUSES_S", (0.01, 0.02, 0.04))


@pytest.fixture
def server():
    with FakeOpenAI() as fake:
        yield fake


@pytest.fixture
def make():
    """Return a function that makes an engine. It connects at once, before faults are planned."""
    made = []

    def build(fake, connects=True, max_num_seqs=64, **limits):
        engine = OpenAIEngine(Server(fake.url, **limits), max_length=256, max_num_seqs=max_num_seqs)
        made.append(engine)
        if connects:
            engine.submit([])
        return engine

    yield build
    for engine in made:
        engine.close()


def requests(count, **params):
    params = {"max_tokens": 20, **params}
    return [request(f"p{i // 2}", i % 2, 4 + i // 2, **params) for i in range(count)]


def script(request, count=None):
    """Return the tokens and log-probs that the server has for a request."""
    written = scripted(request.prompt_ids.tolist(), {"seed": seed_of(request)})
    pairs = [next(written) for _ in range(count or request.params.max_tokens)]
    return [token for token, _, _ in pairs], np.float32([value for _, value, _ in pairs])


def check(wanted, samples):
    assert [sample.id for sample in samples] == [each.id for each in wanted]
    for each, sample in zip(wanted, samples, strict=True):
        tokens, log_probs = script(each)
        assert sample.token_ids.tolist() == tokens and sample.token_ids.dtype == np.int64
        np.testing.assert_array_equal(sample.log_probs, log_probs)
        np.testing.assert_array_equal(sample.untruncated_log_probs, sample.log_probs)
        assert sample.versions.tolist() == [0] * len(tokens) and sample.finish_reason == "length"


def test_samples(server, make):
    server.pause_s = 0.002
    engine, wanted = make(server, max_num_seqs=3), requests(10)
    assert isinstance(engine, RolloutEngine)
    check(wanted, generate(engine, wanted))
    assert (engine.pending(), engine.progress()) == (0, 200)
    stats = engine.stats()
    assert stats["generated_tokens"] == 200
    assert stats["prefill_tokens"] == sum(len(each.prompt_ids) for each in wanted)
    assert server.most == stats["peak_running"] == 3
    assert not any(engine.stats().values())


def test_the_whole_request_on_the_wire(server, make):
    params = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "max_tokens": 4, "min_tokens": 2}
    params |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.4}
    others = {"stop": ("end",), "stop_token_ids": (3, 4), "logit_bias": ((7, 1.5), (8, -2.0))}
    wanted = request("u", 1, [5, 6, 7], **params, **others, seed=9)
    generate(make(server, model="tiny", api_key="secret"), [wanted])
    body = server.bodies()[-1]
    assert body.pop("request_id").startswith("tandem-")
    fixed = {"model": "tiny", "stream": True, "stream_interval": 16, "logprobs": 0, "return_token_ids": True}
    others = {"stop": ["end"], "stop_token_ids": [3, 4], "logit_bias": {"7": 1.5, "8": -2.0}}
    own = {"prompt": [5, 6, 7], "seed": seed_of(wanted), "ignore_eos": True}
    assert body == params | fixed | others | own
    assert non_default(SamplingParams(top_k=0)) == {}
    assert non_default(SamplingParams(temperature=0.5, min_tokens=3)) == {"temperature": 0.5, "min_tokens": 3}


def test_seeds_differ_by_key_and_fit():
    others = request("other"), request("p0", 1), request("p0", seed=1), request("p0", first=7)
    seeds = {seed_of(each) for each in (request("p0"), *others)}
    assert len(seeds) == 5 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_stop_token_ends_a_response(server, make):
    tokens, _ = script(request(max_tokens=20))
    (sample,) = generate(make(server), [request(max_tokens=20, stop_token_ids=(tokens[6],))])
    assert (sample.finish_reason, sample.token_ids.tolist()) == ("stop", tokens[:7])


def test_a_server_without_a_schema_is_asked_for_standard_parameters_only(server, make):
    server.published = False
    engine, wanted = make(server), requests(2)
    check(wanted, generate(engine, wanted))
    error = refused(EngineError, lambda: engine.submit(requests(1, top_k=5)), "does not support")
    assert (error.field, error.got) == ("top_k", 5)
    assert engine.pending() == 0


@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"top_k": 3}, {"presence_penalty": 1.0}])
def test_raw_log_probs_are_refused_where_they_differ(server, make, params):
    server.mode = "raw_logprobs"
    engine, wanted = make(server), requests(2)
    check(wanted, generate(engine, wanted))
    assert len(generate(engine, requests(2, temperature=0.0))) == 2
    refused(EngineError, lambda: engine.submit(requests(1, **params)), "another distribution")


@pytest.mark.parametrize("models", [(), ("one", "two")])
def test_the_model_must_be_clear(server, make, models):
    server.models = models
    refused(EngineError, lambda: make(server), "exactly one model")
    if models:
        assert len(generate(make(server, model="two"), requests(1))) == 1


@pytest.mark.parametrize(("fault", "kind", "message", "got"), [
    ("token_ids", EngineError, "token ids", "/v1/completions"),
    ("logprobs", EngineError, "log-probs", "/v1/completions"),
    ("echo", EngineError, "token 2 differs", "4, 4 tokens in all"),
    ("error", EngineError, "reported an error", "out of memory"),
    ("garbage", EngineError, "not JSON", "{oops"),
    ("other stop", EngineError, "stop tokens", "finish reason 'stop'"),
    ("other length", EngineError, "before it had the length", ": 1"),
    ("short", ServerLost, "ended before", "1 tokens"),
    ("drop", ServerLost, "broke during the answer", "RemoteProtocolError"),
    ("500", ServerLost, "refused", '500 {"error": "500 as planned"}'),
    ("400", Refused, "refused", '400 {"error": "400 as planned"}'),
])  # fmt: skip
def test_a_failure_is_reported_once_and_names_server_and_request(server, make, fault, kind, message, got):
    engine, wanted = make(server, max_num_seqs=1), requests(3)
    server.faults.append(fault)
    engine.submit(wanted)
    with pytest.raises(EngineError, match=message) as caught:
        engine.poll(5.0)
    error = caught.value
    assert type(error) is kind
    assert server.url in str(error.got) and got in str(error.got)
    assert "('p0', 0)" in str(error.field)
    assert engine.pending() == 2
    rest = drain(engine)
    check(wanted[1:], [rest[each.id] for each in wanted[1:]])
    assert len(server.bodies()) == 4


@pytest.mark.parametrize("fault", ["429", "503", "hang up"])
def test_a_request_that_has_not_begun_is_tried_again_a_few_times(server, make, fault):
    engine, wanted = make(server), requests(1)
    server.faults.extend([fault] * 3)
    check(wanted, generate(engine, wanted))
    assert len(server.bodies()) == 5
    assert engine.progress() == 20
    server.faults.extend([fault] * 4)
    refused(ServerLost, lambda: generate(engine, wanted))


def test_nobody_listens(make, server):
    server.close()
    engine = make(server, connects=False, connect_timeout_s=1.0)
    error = refused(ServerLost, lambda: engine.submit(requests(1)), "cannot connect")
    assert server.url in error.got
    assert engine.pending() == 0


def test_no_answer_in_time_and_waiting_for_a_slot_is_not_counted(server, make):
    server.pause_s, wanted = 0.01, requests(6, max_tokens=10)
    engine = make(server, max_num_seqs=1, request_timeout_s=0.5)
    check(wanted, generate(engine, wanted))
    server.faults.append("hang")
    began = time.monotonic()
    refused(ServerLost, lambda: generate(engine, requests(1)), r"in 0\.5 s")
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("aborts", [False, True])
def test_samples_come_before_the_failure_and_an_abort_drops_it(server, make, aborts):
    engine, wanted = make(server, max_num_seqs=1), requests(3)
    server.faults.extend(["", "400"])
    engine.submit(wanted)
    wait_for(lambda: len(server.bodies()) == 4 and engine.progress() == 40)
    time.sleep(0.05)
    check(wanted[:1], engine.poll(1.0))
    if aborts:
        engine.abort([each.id for each in wanted])
        check(wanted, generate(engine, wanted))
        return
    refused(EngineError, lambda: engine.poll(1.0), "refused")
    check(wanted[2:], engine.poll(1.0))


def test_abort_closes_the_connection_and_keeps_what_is_written(server, make):
    server.pause_s = 0.02
    engine, wanted = make(server), requests(4, max_tokens=200)
    engine.submit(wanted)
    write(engine, 20)
    partial = engine.abort([each.id for each in wanted[:3]], keep_partial=True)
    for each, sample in zip(wanted, partial, strict=False):
        count = len(sample.token_ids)
        assert sample.finish_reason == "abort" and 0 < count < 200
        assert sample.token_ids.tolist() == script(each, count)[0]
        assert len(sample.log_probs) == len(sample.versions) == count
    assert engine.pending() == 1 and engine.abort([each.id for each in wanted]) == []
    wait_for(lambda: len(server.cut_off) == 4)
    assert server.cut_off == [server.generates] * 4
    assert engine.poll(0.05) == []
    engine.submit(wanted[:1])  # the id of an aborted request may be used again
    assert engine.pending() == 1


def test_a_finished_sample_that_is_aborted_is_gone(server, make):
    engine, wanted = make(server), requests(1)
    engine.submit(wanted)
    wait_for(lambda: engine.progress() == 20)
    time.sleep(0.05)
    assert len(engine.abort([wanted[0].id], keep_partial=True)[0].token_ids) == 20
    check(wanted, generate(engine, wanted))


@pytest.mark.parametrize("bad", [request("p0", 0), request(prompt=[]), request(prompt=250)])
def test_refused_requests_leave_nothing_behind(server, make, bad):
    engine = make(server)
    refused(EngineError, lambda: engine.submit([*requests(2), bad]))
    assert engine.pending() == 0


def test_weights_cannot_be_changed_and_memory_is_left_alone(server, make):
    engine = make(server)
    assert engine.takes == frozenset()
    refused(EngineError, lambda: engine.update_weights(None, 1), "cannot give its server new weights")
    engine.submit(requests(1))
    refused(EngineError, engine.sleep, "pending")
    drain(engine)
    engine.sleep()
    engine.wake()
    assert len(generate(engine, requests(1))) == 1


def test_close_ends_the_thread(server, make):
    server.pause_s, before = 0.05, threading.active_count()
    engine = make(server)
    engine.submit(requests(2, max_tokens=200))
    engine.poll(0.1)
    engine.close()
    engine.close()
    assert [t for t in threading.enumerate() if t.name == f"rollout {server.url}"] == []
    assert threading.active_count() <= before + 2  # the server's own threads, until they end
    refused(EngineError, lambda: engine.submit(requests(1)), "closed")


def test_a_server_that_is_killed(make):
    process = subprocess.Popen([sys.executable, fakes.__file__, "0.02"], stdout=subprocess.PIPE, text=True)
    try:
        engine = OpenAIEngine(Server(process.stdout.readline().strip()), max_length=256)
        engine.submit(requests(2, max_tokens=200))
        write(engine, 10)
        process.kill()
        refused(ServerLost, lambda: engine.poll(5.0), "broke during the answer")
        engine.close()
    finally:
        process.kill()
        process.wait(10)
