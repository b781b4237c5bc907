"""Tests of several replicas as one engine: which replica gets which request, and lost replicas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.engines.rollout.base import RolloutEngine, SharedModule, WeightStream, generate
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.rollout.http.connection import Server, ServerLost
from tandem.engines.rollout.http.openai import OpenAIEngine
from tandem.engines.rollout.http.router import Router
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tandem.protocol import Request, Sample, SamplingParams
from tests.engines.rollout.http.fakes import FakeOpenAI

pytest.register_assert_rewrite("tests.contract.rollout")
from tests.contract.rollout import RolloutContract  # noqa: E402
from tests.contract.world import VOCABULARY, EngineKind  # noqa: E402

CPU = torch.device("cpu")


def request(uid, sample=0, prompt=4, new=8):
    return Request(uid, sample, np.arange(1, 1 + prompt), SamplingParams(max_tokens=new))


class Recorder:
    """An engine that finishes requests only when `finish` is called."""

    takes = frozenset({SharedModule, WeightStream})

    def __init__(self, weights=None):
        self.held: dict[tuple[str, int], Request] = {}
        self.order: list[tuple[str, int]] = []
        self.done: list[Sample] = []
        self.calls: list[str] = []
        self.weights = weights or {"w": 1}
        self.failure: EngineError | None = None

    def submit(self, requests):
        if isinstance(self.failure, ServerLost):
            raise self.failure
        for given in requests:
            assert given.id not in self.held
            self.held[given.id] = given
            self.order.append(given.id)

    def finish(self, *ids, tokens=3):
        for name in ids or tuple(self.held):
            given = self.held.pop(name)
            column = np.zeros(tokens)
            self.done.append(Sample(given.uid, given.sample, column, column, column, "stop"))

    def poll(self, timeout_s):
        if self.failure is not None:
            raise self.failure
        done, self.done = self.done, []
        return done

    def pending(self):
        return len(self.held)

    def abort(self, ids, *, keep_partial=False):
        dropped = [self.held.pop(name) for name in ids if name in self.held]
        column = np.zeros(1)
        partial = [Sample(r.uid, r.sample, column, column, column, "abort") for r in dropped]
        return partial if keep_partial else []

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


def router_of(engines, window=100, **options):
    return Router(engines, max_length=256, window=window, **options)


def test_the_longest_go_first_and_each_to_the_least_loaded():
    """Graham's greedy rule by hand, with 9, 8, 6, 5, 4, 2 on two replicas."""
    first, second = Recorder(), Recorder()
    router = router_of([first, second])
    works = {"e": 4, "c": 6, "a": 9, "f": 2, "b": 8, "d": 5}
    router.submit([request(uid, prompt=1, new=work - 1) for uid, work in works.items()])
    router.poll(0)
    assert [uid for uid, _ in first.order] == ["a", "d", "e"]
    assert [uid for uid, _ in second.order] == ["b", "c", "f"]


def test_random_loads_are_balanced():
    rng = np.random.default_rng(0)
    engines = [Recorder() for _ in range(4)]
    router = router_of(engines, window=1000)
    router.submit([request(f"u{i}", j, int(n), int(m)) for i, (n, m) in
                   enumerate(rng.integers(1, 100, (60, 2))) for j in range(4)])  # fmt: skip
    router.poll(0)
    loads = [sum(len(r.prompt_ids) + r.params.max_tokens for r in e.held.values()) for e in engines]
    assert max(loads) < 1.1 * np.mean(loads)
    homes = {}
    for number, engine in enumerate(engines):
        for uid, _ in engine.order:
            homes.setdefault(uid, set()).add(number)
    assert sum(len(where) == 1 for where in homes.values()) >= 55


def test_the_samples_of_a_prompt_stay_together_unless_there_is_nothing_else():
    first, second = Recorder(), Recorder()
    router = router_of([first, second])
    router.submit([request(uid, sample) for uid in "abcd" for sample in range(8)])
    router.poll(0)
    assert {uid for uid, _ in first.order} == {"a", "c"}
    assert {uid for uid, _ in second.order} == {"b", "d"}
    alone, other = Recorder(), Recorder()
    router = router_of([alone, other])
    router.submit([request("a", sample) for sample in range(8)])
    router.poll(0)
    assert (len(alone.order), len(other.order)) == (5, 3)


def test_a_later_turn_goes_where_the_conversation_is():
    first, second = Recorder(), Recorder()
    router = router_of([first, second])
    router.submit([request("a"), request("b")])
    router.poll(0)
    assert second.order == [("b", 0)]
    second.finish()
    assert [sample.id for sample in router.poll(1)] == [("b", 0)]
    first.finish()
    router.poll(1)
    router.submit([request("b", 1, prompt=20)])
    router.poll(0)
    assert second.order[-1] == ("b", 1)


def test_the_length_of_earlier_responses_is_what_is_expected():
    first, second = Recorder(), Recorder()
    router = router_of([first, second])
    router.submit([request("short", new=100)])
    router.poll(0)
    first.finish(tokens=2)
    router.poll(1)
    router.submit([request("short", 1, new=100), request("new", new=50), request("other", new=40)])
    router.poll(0)
    assert first.order[1:] == [("new", 0), ("short", 1)]  # 54 tokens, then 4 + 2 and not 4 + 100
    assert second.order == [("other", 0)]


def test_a_replica_has_no_more_than_its_window_and_gets_the_next_when_it_has_room():
    first, second = Recorder(), Recorder()
    router = router_of([first, second], window=2)
    router.submit([request(f"u{i}", new=50 - i) for i in range(7)])
    router.poll(0)
    assert (len(first.held), len(second.held), router.pending()) == (2, 2, 7)
    first.finish()
    assert len(router.poll(1)) == 2
    router.poll(0)
    assert (len(first.held), len(second.held), router.pending()) == (2, 2, 5)
    assert first.order == [("u0", 0), ("u3", 0), ("u4", 0), ("u5", 0)]


def test_a_replica_with_nothing_to_do_helps():
    """Requests of a group that wait for their home go to another replica that has free capacity."""
    first, second = Recorder(), Recorder()
    router = router_of([first, second], window=4)
    router.submit([request("a", sample) for sample in range(4)] + [request("b", new=2)])
    router.poll(0)
    second.finish()
    router.poll(1)
    router.submit([request("a", sample) for sample in range(4, 8)])
    router.poll(0)
    assert len(second.held) == 4


def test_partial_and_waiting_requests_are_aborted():
    first, second = Recorder(), Recorder()
    router = router_of([first, second], window=1)
    router.submit([request(f"u{i}") for i in range(4)])
    router.poll(0)
    gone = router.abort([("u0", 0), ("u3", 0), ("nobody", 0)], keep_partial=True)
    assert {(sample.id, len(sample.token_ids)) for sample in gone} == {(("u0", 0), 1), (("u3", 0), 0)}
    assert router.pending() == 2
    assert router.abort([("u1", 0), ("u2", 0)]) == []
    assert router.pending() == 0
    assert not first.held and not second.held


@pytest.mark.parametrize("failure", [EngineError("broken"), ServerLost("gone")])
def test_what_a_lost_replica_had_is_redone(failure):
    first, second = Recorder(), Recorder()
    lines = []
    router = router_of([first, second], names=["one", "two"], log=lines.append)
    router.submit([request(f"u{i}") for i in range(6)])
    router.poll(0)
    first.finish(("u0", 0))
    assert [sample.id for sample in router.poll(1)] == [("u0", 0)]
    first.failure = failure
    assert router.poll(0) == []
    router.poll(0)
    second.finish()
    rest = router.poll(1)
    assert sorted(sample.uid for sample in rest) == [f"u{i}" for i in range(1, 6)]
    assert router.pending() == 0
    assert not first.held and first.calls == ["close"]
    [line] = lines
    assert "one" in line and "2 requests" in line and str(failure) in line


def test_a_replica_that_cannot_be_reached_gets_nothing():
    first, second = Recorder(), Recorder()
    first.failure = ServerLost("no connection")
    router = router_of([first, second])
    samples = []
    router.submit([request(f"u{i}") for i in range(4)])
    while router.pending():
        samples += router.poll(0)
        second.finish()
    assert len(samples) == 4


def test_all_lost():
    engines = [Recorder(), Recorder()]
    router = router_of(engines, names=["one", "two"])
    router.submit([request("a"), request("b")])
    router.poll(0)
    engines[0].failure, engines[1].failure = EngineError("out of memory"), EngineError("no route")
    with pytest.raises(EngineError, match="all replicas are lost") as caught:
        router.poll(0)
    assert "one: out of memory\ntwo: no route" in caught.value.got


def test_a_request_that_is_refused_is_no_loss():
    first, second = Recorder(), Recorder()
    router = router_of([first, second])

    def refuse(requests):
        raise EngineError("a token outside the model's vocabulary")

    first.submit = refuse
    router.submit([request("a"), request("b")])
    with pytest.raises(EngineError, match="vocabulary"):
        router.poll(0)
    assert router.pending() == 2
    router.abort([("a", 0), ("b", 0)])
    assert router.pending() == 0
    with pytest.raises(EngineError, match="already"):
        router.submit([request("a"), request("a")])
    assert router.pending() == 0


def test_calls_reach_all_replicas():
    engines = [Recorder(), Recorder(), Recorder()]
    router = router_of(engines)
    assert isinstance(router, RolloutEngine)
    assert router.takes == {SharedModule, WeightStream}
    router.sleep()
    router.wake()
    tensors = [("a", torch.ones(3)), ("b", torch.zeros(2))]
    assert router.update_weights(WeightStream(iter(tensors)), 4) == digest(tensors)
    router.close()
    assert all(engine.calls == ["sleep", "wake", "update 4", "close"] for engine in engines)
    engines[1].order.append(("u", 0))
    assert router.stats() == {"generated_tokens": 21.0, "peak_running": 6.0, "cache_use": 0.25}
    assert router.progress() == 15
    router.submit([request("a")])
    with pytest.raises(EngineError, match="pending"):
        router.sleep()


@pytest.mark.parametrize("other", [{"w": 1, "v": 3}, {"w": 1}])
def test_replicas_must_hold_the_same_weights(other):
    router = router_of([Recorder({"w": 1, "v": 2}), Recorder(other)], names=["one", "two"])
    with pytest.raises(EngineError, match="different weights") as caught:
        router.update_weights(SharedModule(torch.nn.Linear(1, 1)), 1)
    assert caught.value.field == "v"
    assert caught.value.got.startswith("two: ") and caught.value.expected == "as one: 2"


def test_a_replica_that_does_not_take_the_weights_is_lost():
    first, second = Recorder(), Recorder()
    first.failure = EngineError("no room")
    router = router_of([first, second])
    tensors = [("a", torch.ones(3)), ("b", torch.zeros(2))]
    assert router.update_weights(WeightStream(iter(tensors)), 1) == digest(tensors)
    router.submit([request("a")])
    router.poll(0)
    assert list(second.held) == [("a", 0)]


@pytest.mark.slow
class TestRouter(RolloutContract):
    @pytest.fixture(scope="class")
    @classmethod
    def kind(cls):
        def make(world, *, max_length, max_num_seqs=64, **options):
            engines = [
                NativeEngine(
                    device=CPU,
                    max_length=max_length,
                    max_num_seqs=max_num_seqs,
                    decode=world.decode,
                    **options,
                )
                for _ in range(2)
            ]
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
        if self._left < 0:
            raise EngineError("the device fell off the bus")
        return self._engine.poll(timeout_s)


@pytest.mark.parametrize("kind", [NativeEngine, HFEngine])
def test_samples_are_the_same_with_and_without_death(kind, tiny, make_requests):
    model = tiny(dtype=torch.float64)
    requests = make_requests(6, 2, temperature=1.0)

    def replica():
        return kind(device=CPU, max_length=96, max_num_seqs=4)

    alone = replica()
    alone.update_weights(SharedModule(model), 0)
    expected = [sample.token_ids.tolist() for sample in generate(alone, requests)]
    for engines in ([replica(), replica()], [replica(), Mortal(replica(), 3), Mortal(replica(), 1)]):
        router = router_of(engines, window=6)
        router.update_weights(SharedModule(model), 0)
        assert [sample.token_ids.tolist() for sample in generate(router, requests)] == expected
        router.close()


def test_a_server_that_dies_in_the_middle():
    requests = [request(f"u{i}", j, prompt=3 + i, new=30) for i in range(6) for j in range(2)]
    with FakeOpenAI(pause_s=0.003) as good, FakeOpenAI(pause_s=0.003) as bad:
        engines = [OpenAIEngine(Server(fake.url), max_length=256, max_num_seqs=4) for fake in (good, bad)]
        router = router_of(engines, window=5)
        single = OpenAIEngine(Server(good.url), max_length=256)
        expected = [sample.token_ids.tolist() for sample in generate(single, requests)]
        single.close()
        bad.faults.extend(["", "", "drop"])
        assert [sample.token_ids.tolist() for sample in generate(router, requests)] == expected
        assert router.pending() == 0
        router.close()
        assert len(bad.bodies("/v1/completions")) >= 4
