import time

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import RolloutEngine, SharedModule, WeightStream, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.http.connection import Refused, Server, ServerLost
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.engines.rollout.http.router import Router
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tandem.protocol import Sample
from tests.contract.rollout import RolloutContract
from tests.contract.world import VOCABULARY, EngineKind
from tests.engines.rollout import case
from tests.engines.rollout.case import CPU, native, tokens
from tests.engines.rollout.http.fakes import FakeOpenAI
from tests.support.refusing import refused

WEIGHTS = [("a", torch.ones(3)), ("b", torch.zeros(2))]


def request(uid, sample=0, prompt=4, new=8):
    return case.request(uid, sample, prompt, max_tokens=new)


def sample_of(request, tokens, reason):
    return Sample(request.uid, request.sample, *[np.zeros(tokens)] * 3, reason)


def refuse(text):
    raise EngineError(text)


class Recorder:
    """An engine that finishes requests only when `finish` is called."""

    takes = frozenset({SharedModule, WeightStream})

    def __init__(self, weights=None):
        self.held, self.order, self.done, self.calls = {}, [], [], []
        self.weights = weights or {"w": 1}
        self.failure = None

    @property
    def uids(self):
        return [uid for uid, _ in self.order]

    def submit(self, requests):
        if isinstance(self.failure, ServerLost):
            raise self.failure
        for given in requests:
            assert given.id not in self.held
            self.held[given.id] = given
            self.order.append(given.id)

    def finish(self, *ids, tokens=3):
        self.done += [sample_of(self.held.pop(name), tokens, "stop") for name in ids or tuple(self.held)]

    def poll(self, timeout_s):
        if self.failure is not None:
            raise self.failure
        done, self.done = self.done, []
        return done

    def pending(self):
        return len(self.held)

    def abort(self, ids, *, keep_partial=False):
        dropped = [self.held.pop(name) for name in ids if name in self.held]
        return [sample_of(each, 1, "abort") for each in dropped] if keep_partial else []

    def update_weights(self, source, version):
        if self.failure is not None:
            raise self.failure
        self.calls.append(f"update {version}")
        return digest(source.tensors) if isinstance(source, WeightStream) else self.weights

    def sleep(self, tags=()):
        self.calls.append("sleep")

    def wake(self, tags=()):
        self.calls.append("wake")

    def close(self):
        self.calls.append("close")

    def progress(self):
        return 5

    def stats(self):
        return {"generated_tokens": 7.0, "peak_running": 2.0, "cache_use": 0.25 * len(self.order)}


def make(*requests, window=100, **options):
    """Return a router over two replicas, and these, after it has assigned the requests."""
    engines = [Recorder(), Recorder()]
    router = Router(engines, max_length=256, window=window, **options)
    assign(router, *requests)
    return router, *engines


def assign(router, *requests):
    router.submit(requests)
    return router.poll(0)


def test_the_longest_go_first_and_each_to_the_least_loaded():
    works = {"e": 4, "c": 6, "a": 9, "f": 2, "b": 8, "d": 5}
    _, first, second = make(*(request(uid, prompt=1, new=work - 1) for uid, work in works.items()))
    assert (first.uids, second.uids) == (["a", "d", "e"], ["b", "c", "f"])


def test_random_loads_are_balanced():
    sizes = np.random.default_rng(0).integers(1, 100, (60, 2)).tolist()
    engines, homes = [Recorder() for _ in range(4)], {}
    router = Router(engines, max_length=256, window=1000)
    assign(router, *(request(f"u{i}", j, n, m) for i, (n, m) in enumerate(sizes) for j in range(4)))
    loads = [sum(len(r.prompt_ids) + r.params.max_tokens for r in e.held.values()) for e in engines]
    assert max(loads) < 1.1 * np.mean(loads)
    for number, engine in enumerate(engines):
        for uid in engine.uids:
            homes.setdefault(uid, set()).add(number)
    assert sum(len(where) == 1 for where in homes.values()) >= 55


def test_the_samples_of_a_prompt_stay_together_unless_there_is_nothing_else():
    _, first, second = make(*(request(uid, sample) for uid in "abcd" for sample in range(8)))
    assert (set(first.uids), set(second.uids)) == ({"a", "c"}, {"b", "d"})
    _, first, second = make(*(request("a", sample) for sample in range(8)))
    assert (len(first.order), len(second.order)) == (5, 3)


def test_a_later_turn_goes_where_the_conversation_is():
    router, first, second = make(request("a"), request("b"))
    assert second.order == [("b", 0)]
    second.finish()
    assert [sample.id for sample in router.poll(1)] == [("b", 0)]
    first.finish()
    router.poll(1)
    assign(router, request("b", 1, prompt=20))
    assert second.order[-1] == ("b", 1)


def test_the_length_of_earlier_responses_is_what_is_expected():
    router, first, second = make(request("short", new=100))
    first.finish(tokens=2)
    router.poll(1)
    assign(router, request("short", 1, new=100), request("new", new=50), request("other", new=40))
    assert first.order[1:] == [("new", 0), ("short", 1)]  # 54 tokens, then 4 + 2 and not 4 + 100
    assert second.order == [("other", 0)]


def test_a_replica_has_no_more_than_its_window_and_gets_the_next_when_it_has_room():
    router, first, second = make(*(request(f"u{i}", new=50 - i) for i in range(7)), window=2)
    assert (len(first.held), len(second.held), router.pending()) == (2, 2, 7)
    first.finish()
    assert len(router.poll(1)) == 2
    router.poll(0)
    assert (len(first.held), len(second.held), router.pending()) == (2, 2, 5)
    assert first.uids == ["u0", "u3", "u4", "u5"]


def test_a_replica_with_nothing_to_do_helps():
    router, _, second = make(*(request("a", n) for n in range(4)), request("b", new=2), window=4)
    second.finish()
    router.poll(1)
    assign(router, *(request("a", sample) for sample in range(4, 8)))
    assert len(second.held) == 4


def test_many_waiting_requests_cost_a_poll_nothing():
    router, first, _ = make(*(request(f"u{i}") for i in range(100_000)), window=4)
    began = time.process_time()
    for _ in range(30):
        router.poll(0)
    assert time.process_time() - began < 0.3
    began = time.process_time()
    for _ in range(10):
        first.finish(next(iter(first.held)))
        assert len(router.poll(0)) == 1  # then the next request takes its place
    assert time.process_time() - began < 2


def test_partial_and_waiting_requests_are_aborted():
    router, first, second = make(*(request(f"u{i}") for i in range(4)), window=1)
    gone = router.abort([("u0", 0), ("u3", 0), ("nobody", 0)], keep_partial=True)
    assert {(sample.id, len(sample.token_ids)) for sample in gone} == {(("u0", 0), 1), (("u3", 0), 0)}
    assert router.pending() == 2 and router.abort([("u1", 0), ("u2", 0)]) == []
    assert router.pending() == 0
    assert not first.held and not second.held


@pytest.mark.parametrize("failure", [EngineError("broken"), ServerLost("gone")])
def test_what_a_lost_replica_had_is_redone(failure):
    lines = []
    requests = [request(f"u{i}") for i in range(6)]
    router, first, second = make(*requests, names=["one", "two"], log=lines.append)
    first.finish(("u0", 0))
    assert [sample.id for sample in router.poll(1)] == [("u0", 0)]
    first.failure = failure
    assert router.poll(0) == []
    router.poll(0)
    second.finish()
    assert sorted(sample.uid for sample in router.poll(1)) == [f"u{i}" for i in range(1, 6)]
    assert router.pending() == 0
    assert not first.held and first.calls == ["close"]
    [line] = lines
    assert "one" in line and "2 requests" in line and str(failure) in line


def test_what_a_lost_replica_had_comes_before_what_waits():
    router, first, second = make(*(request(f"u{i}") for i in range(4)), window=1)
    first.failure = EngineError("broken")
    router.poll(0)
    for _ in range(6):  # a poll returns samples, the next one assigns requests
        second.finish()
        router.poll(0)
    assert second.uids == ["u1", "u0", "u2", "u3"]


def test_a_replica_that_cannot_be_reached_gets_nothing_until_all_are_lost():
    router, first, second = make(names=["one", "two"])
    first.failure = ServerLost("no connection")
    samples = assign(router, *(request(f"u{i}") for i in range(4)))
    while router.pending():
        second.finish()
        samples += router.poll(0)
    assert len(samples) == 4
    second.failure = EngineError("no route")
    router.submit([request("a")])
    error = refused(EngineError, lambda: router.poll(0), "all replicas are lost")
    assert "one: no connection\ntwo: no route" in error.got


def test_a_request_that_is_refused_is_no_loss(monkeypatch):
    router, first, _ = make()
    monkeypatch.setattr(first, "submit", lambda requests: refuse("a token outside the vocabulary"))
    refused(EngineError, lambda: assign(router, request("a"), request("b")), "vocabulary")
    assert router.pending() == 2
    router.abort([("a", 0), ("b", 0)])
    assert router.pending() == 0
    refused(EngineError, lambda: router.submit([request("a"), request("a")]), "already")
    assert router.pending() == 0


def test_calls_reach_all_replicas():
    router, first, second = make()
    assert isinstance(router, RolloutEngine) and router.takes == {SharedModule, WeightStream}
    router.sleep()
    router.wake()
    assert router.update_weights(WeightStream(iter(WEIGHTS)), 4) == digest(WEIGHTS)
    router.close()
    assert first.calls == second.calls == ["sleep", "wake", "update 4", "close"]
    second.order.append(("u", 0))
    assert router.stats() == {"generated_tokens": 14.0, "peak_running": 4.0, "cache_use": 0.25}
    assert router.progress() == 10
    router.submit([request("a")])
    refused(EngineError, router.sleep, "pending")


@pytest.mark.parametrize("other", [{"w": 1, "v": 3}, {"w": 1}])
def test_replicas_must_hold_the_same_weights(other):
    router, first, second = make(names=["one", "two"])
    first.weights, second.weights = {"w": 1, "v": 2}, other
    with pytest.raises(EngineError, match="different weights") as caught:
        router.update_weights(SharedModule(torch.nn.Linear(1, 1)), 1)
    assert caught.value.field == "v"
    assert caught.value.got.startswith("two: ") and caught.value.expected == "as one: 2"


def test_a_replica_that_does_not_take_the_weights_is_lost():
    router, first, second = make()
    first.failure = EngineError("no room")
    assert router.update_weights(WeightStream(iter(WEIGHTS)), 1) == digest(WEIGHTS)
    assign(router, request("a"))
    assert list(second.held) == [("a", 0)]


@pytest.mark.slow
class TestRouter(RolloutContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls):
        def make(world, *, max_length, max_num_seqs=64, **options):
            options |= {"max_length": max_length, "max_num_seqs": max_num_seqs, "decode": world.decode}
            engines = [native(**options) for _ in range(2)]
            return Router(engines, max_length=max_length, window=max_num_seqs, vocabulary=VOCABULARY)

        return EngineKind("router", make, SharedModule)


class Mortal:
    """An engine that fails at its n-th poll."""

    def __init__(self, engine, polls):
        self._engine, self._left = engine, polls

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def poll(self, timeout_s):
        self._left -= 1
        return self._engine.poll(timeout_s) if self._left >= 0 else refuse("the device fell off the bus")


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_samples_are_the_same_with_and_without_death(kind, tiny, make_requests):
    model, requests, written = tiny(dtype=torch.float64), make_requests(6, 2, temperature=1.0), []
    for polls in ([99], [99, 99], [99, 3, 1]):
        engines = [Mortal(kind(device=CPU, max_length=96, max_num_seqs=4), n) for n in polls]
        router = Router(engines, max_length=256, window=6)
        router.update_weights(SharedModule(model), 0)
        written.append(tokens(generate(router, requests)))
        router.close()
    assert written[0] == written[1] == written[2]


def test_a_server_that_dies_in_the_middle_or_refuses_one_request():
    requests = [request(f"u{i}", j, prompt=3 + i, new=30) for i in range(6) for j in range(2)]
    with FakeOpenAI(pause_s=0.003) as good, FakeOpenAI(pause_s=0.003) as bad:
        one, two = (OpenAIEngine(Server(f.url), max_length=256, max_num_seqs=4) for f in (good, bad))
        router = Router([one, two], max_length=256, window=5)
        expected = tokens(generate(one, requests))
        two.submit([])  # connects
        bad.faults.append("400")
        error = refused(Refused, lambda: generate(router, requests), "refused")
        assert "400 as planned" in str(error.got)
        assert router.pending() == 0
        before = len(bad.bodies())
        bad.faults.extend(["", "", "drop"])
        assert tokens(generate(router, requests)) == expected and router.pending() == 0
        router.close()
        assert len(bad.bodies()) - before >= 3  # it still gets its share until it is lost
