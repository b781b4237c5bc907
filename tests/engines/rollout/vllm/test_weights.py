import asyncio
import math
from types import SimpleNamespace

import pytest
import torch

from tandem.engines.rollout.http.channel import Network
from tandem.engines.rollout.http.connection import Server, ServerLost
from tandem.engines.rollout.vllm.memory import DeviceMemory
from tandem.engines.rollout.vllm.server import VLLMServerEngine
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tests.engines.rollout.case import CPU, stream
from tests.engines.rollout.http.fake_vllm import FakeVLLM
from tests.engines.rollout.http.fakes import Reply
from tests.engines.rollout.vllm.models import build
from tests.support.refusing import refused


@pytest.fixture
def server():
    held = {name: torch.zeros_like(value) for name, value in build().named_parameters()}
    with FakeVLLM(held) as fake:
        yield fake


@pytest.fixture
def make(server):
    """Return a function that makes an engine. Some of its weight buckets hold one tensor, some several."""
    made = []

    def build_engine(**options):
        options = {"config": build().config, "max_length": 64, "bucket_bytes": 20_000, **options}
        made.append(VLLMServerEngine(Server(server.url), **options))
        return made[-1]

    yield build_engine
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make):
    return make(sleeps=True)


@pytest.fixture
def networked(make):
    return make(network=Network(CPU))


def check_update(server, engine, version):
    model = build(seed=version)
    assert engine.update_weights(stream(model), version) == digest(model.named_parameters())
    assert all(torch.equal(server.held[name], value) for name, value in model.named_parameters())


def test_weights_go_through_memory_that_has_no_name_and_no_limit_of_its_own(server, engine):
    """Files in /dev/shm cause a bus error when it is full, and they outlive a killed process."""
    check_update(server, engine, 3)
    assert len(server.files) > 3 and set(server.files) == {"/memfd:tandem-weights (deleted)"}


@pytest.mark.parametrize("raw", [False, True])
def test_raw_log_probs_are_refused_and_equal_logits_are_not(raw, engine, monkeypatch):
    """A server without weights may give all tokens the same logit. top_k=1 keeps all of them."""

    async def ask(self, method, path, *, json):
        likeliest = len(json["sampling_params"].get("logit_bias", range(46)))
        value = -1.5 if raw else -math.log(likeliest)
        return {"choices": [{"logprobs": {"content": [{"logprob": value}]}}]}

    monkeypatch.setattr(VLLMServerEngine, "ask", ask)
    if not raw:
        asyncio.run(engine.connect())
        return
    error = refused(EngineError, lambda: asyncio.run(engine.connect()), "another distribution")
    assert "processed_logprobs" in error.remedy


@pytest.mark.parametrize("workers", [1, 3])
def test_weights_go_over_the_network_to_each_worker_in_one_group_for_all_versions(server, networked, workers):
    server.workers = workers
    for version in (1, 2):
        check_update(server, networked, version)
    assert server.calls.count("tandem_join") == 1
    assert server.received == [workers] * len(server.received) and len(server.received) > 6
    assert server.files == []


def test_a_bucket_that_the_server_does_not_want_is_told_and_the_next_group_works(server, make, monkeypatch):
    engine = make(network=Network(CPU), bucket_bytes=1 << 30)
    check_update(server, engine, 1)
    with monkeypatch.context() as patch:
        patch.setattr(server, "answer", lambda *_: Reply({"error": "out of memory"}, 500))
        patch.setattr(engine, "call", lambda *_, **__: None)
        error = refused(ServerLost, lambda: engine.update_weights(stream(build(seed=2)), 2), "refused")
    assert server.url in error.got and "out of memory" in error.got
    check_update(server, engine, 3)


def test_a_server_that_does_not_come_to_the_group_is_named(server, networked, monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.http.channel._LIMIT_S", 1.0)
    monkeypatch.setattr(server, "_tandem_join", lambda *_: server._closing.wait(20), raising=False)
    with pytest.raises(ServerLost, match="did not reach the server") as caught:
        networked.update_weights(stream(build()), 1)
    assert server.url in caught.value.got


def test_what_the_server_holds_is_summed_once(server, engine):
    check_update(server, engine, 1)
    assert server.calls.count("tandem_digest") == 1
    with pytest.raises(EngineError, match="incomplete") as caught:
        engine.update_weights(stream(build(), lambda name, t: None if "norm" in name else t), 2)
    assert caught.value.field == "model.layers.0.input_layernorm.weight"


def test_a_server_that_is_half_awake_falls_asleep(server, engine):
    engine.sleep()
    engine.wake({"weights"})
    assert server.asleep == {"kv_cache"}
    engine.sleep()
    assert server.asleep == {"weights", "kv_cache"}


def test_the_process_is_ended_even_if_the_connection_is_not(make, monkeypatch):
    ends = []
    engine = make(process=SimpleNamespace(close=lambda: ends.append(True)))
    with monkeypatch.context() as patch:
        patch.setattr(engine._connection, "close", lambda: 1 / 0)
        refused(ZeroDivisionError, engine.close)
    assert ends == [True]


class Sleeper:
    """A fake of vLLM's sleep mode. A partly sleeping engine only warns when it is told to sleep."""

    asleep: frozenset[str] = frozenset()

    def is_sleeping(self):
        return bool(self.asleep)

    def sleep(self, level):
        self.asleep = self.asleep or {"weights", "kv_cache"}

    def wake_up(self, tags=None):
        self.asleep = self.asleep - set(tags or ("weights", "kv_cache"))


def test_device_memory_that_is_taken_again_in_part_can_be_given_back():
    engine = Sleeper()
    memory = DeviceMemory(engine)
    memory.release({"weights", "kv_cache"})
    memory.restore({"weights"})
    assert engine.asleep == {"kv_cache"}
    memory.release({"weights"})
    assert engine.asleep == {"weights", "kv_cache"}
