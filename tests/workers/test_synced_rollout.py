import gc
import re
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from tandem.engines.rollout.base import SLEEP_TAGS
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.weight_sync import WeightSyncError
from tandem.errors import ConfigError, EngineError
from tandem.workers import actor_part, rollout_part
from tests.workers import roles
from tests.workers.streamed import FAULTS, NAME, TWIN, StreamedEngine

PROMPTS = roles.make_prompts(3)

HF = "actor_rollout_ref.rollout.name=hf"
MIXED = [f"actor_rollout_ref.actor.fsdp_config.{key}" for key in ("model_dtype=fp32", "dtype=bf16")]
SMALL = "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1"


@pytest.fixture
def config(folder, tmp_path):
    return roles.make_config(folder, HF, SMALL, run=tmp_path)


def both(config):
    return roles.make_actor(config, "actor", "rollout")


def streaming(config):
    worker = both(config)
    dtype = worker.parts["rollout"].policy.compute_dtype
    worker.parts["rollout"].engine = StreamedEngine(config.actor_rollout_ref.model.path, dtype)
    return worker


def generate(worker):
    return worker.generate_sequences(PROMPTS, 2, roles.PARAMS)


def same(first, second):
    a, b = (batch.ragged("rollout_log_probs").values for batch in (first, second))
    return first.ragged("tokens").equal(second.ragged("tokens")) and torch.allclose(a, b, rtol=0, atol=1e-12)


def test_a_streamed_engine_writes_what_one_that_shares_the_module_writes(config):
    shared, streamed = both(config), streaming(config)
    for _ in range(2):
        batch, other = generate(shared), generate(streamed)
        assert same(batch, other)
        roles.learn(shared, batch)
        roles.learn(streamed, other)
    assert streamed.take_timings()["timing/weight_sync"] > 0


def test_a_stream_leaves_the_trained_weights_sharded_and_idle(config, monkeypatch):
    worker, calls = streaming(config), []

    def watch(owner, name):
        original = getattr(owner, name)

        def noted(*args, **more):
            calls.append(name)
            return original(*args, **more)

        monkeypatch.setattr(owner, name, noted, raising=False)

    for name in ("onload", "offload", "unsharded"):
        watch(worker.actor, name)
    watch(worker.parts["rollout"].engine, "poll")
    generate(worker)
    assert calls[:3] == ["onload", "offload", "poll"] and "unsharded" not in calls


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", ["stream", "pools"])
def test_a_fault_on_the_way_is_named(config, way, fault):
    damage, told = FAULTS[fault]
    worker, apart = (streaming if way == "stream" else both)(config), roles.make_actor(config, "rollout")
    roles.transfer(worker, apart)
    roles.learn(worker, generate(worker))
    if way == "stream":
        worker.parts["rollout"].engine.fault = damage

    def spoilt(bucket):
        return replace(bucket, tensors=dict(damage(iter(bucket.tensors.items()))))

    with pytest.raises(WeightSyncError, match="version 1") as caught:
        generate(worker) if way == "stream" else roles.transfer(worker, apart, spoilt)
    assert re.match(told, str(caught.value.got)), caught.value.got
    assert caught.value.field == NAME
    if way == "stream":
        worker.parts["rollout"].engine.fault = None
    roles.transfer(worker, apart)
    assert same(generate(apart), generate(worker))


def test_a_bucket_of_old_weights_is_refused(config, monkeypatch):
    names = list(roles.make_actor(config, "actor").actor.weight_shapes)
    monkeypatch.setattr(actor_part, "buckets", lambda sizes, limit: [tuple(names[:5]), tuple(names[5:])])
    actor, apart = both(config), roles.make_actor(config, "rollout")
    assert actor.weight_buckets() == 2
    old = actor.export_weights(0)
    assert list(old.tensors) == names[:5] and old.sent is None
    roles.learn(actor, generate(actor))
    apart.load_weights(old)
    with pytest.raises(WeightSyncError, match="out of order"):
        apart.load_weights(actor.export_weights(1))


@pytest.mark.parametrize("fault", ["stale", "swapped", "damaged"])
def test_a_fault_in_the_shared_module_is_named(folder, tmp_path, monkeypatch, fault):
    """With bf16 over fp32, the unsharded weights are a copy that can be wrong."""
    worker = both(roles.make_config(folder, HF, *MIXED, run=tmp_path))
    batch = generate(worker)
    old = {name: value.clone() for name, value in worker.actor.weights(dtype=torch.bfloat16)}
    roles.learn(worker, batch)
    original = worker.actor.unsharded

    @contextmanager
    def faulty():
        with original() as module:
            parameters = {name: parameter.data for name, parameter in module.named_parameters()}
            kept, twin = parameters[NAME].clone(), parameters[TWIN]
            if fault == "damaged":
                parameters[NAME][0, 0] = 7
            else:
                parameters[NAME].copy_(old[NAME] if fault == "stale" else twin)
            if fault == "swapped":
                twin.copy_(kept)
            yield module

    monkeypatch.setattr(worker.actor, "unsharded", faulty)
    with pytest.raises(WeightSyncError) as caught:
        generate(worker)
    assert re.match(FAULTS["skipped" if fault == "stale" else fault][1], str(caught.value.got))
    monkeypatch.setattr(worker.actor, "unsharded", original)
    generate(worker)


def test_a_module_that_the_engine_has_copied_is_sharded_again(folder, tmp_path, monkeypatch):
    """This is the case on CUDA, where the native engine has packed copies of the weights."""
    config = roles.make_config(folder, run=tmp_path)
    worker, plain = both(config), both(config)
    engine, actor = worker.parts["rollout"].engine, worker.actor
    monkeypatch.setattr(engine, "_copies", lambda source, runner: True)
    poll, offload, kept, offloads = engine.poll, actor.offload, [], []

    def watched(timeout_s):
        kept.append(any(not isinstance(p, DTensor) for p in actor.module.parameters()))
        assert offloads
        return poll(timeout_s)

    monkeypatch.setattr(engine, "poll", watched)
    monkeypatch.setattr(actor, "offload", lambda: (offloads.append(True), offload()))
    for _ in range(2):
        batch = generate(worker)
        assert same(batch, generate(plain))
        roles.learn(worker, batch)
        roles.learn(plain, batch)
        offloads.clear()
    assert kept and not any(kept)


@pytest.mark.parametrize(("free", "tags"), [("true", SLEEP_TAGS), ("false", ("weights",))])
def test_memory_is_given_back_after_generation_as_the_config_says(folder, tmp_path, monkeypatch, free, tags):
    words = (HF, f"actor_rollout_ref.rollout.free_cache_engine={free}")
    config, slept = roles.make_config(folder, *words, run=tmp_path), []
    for worker in (both(config), streaming(config)):
        monkeypatch.setattr(worker.parts["rollout"].engine, "sleep", slept.append)
        generate(worker)
    assert slept == ([tags, SLEEP_TAGS] if free == "true" else [tags])


def test_the_first_error_is_the_one_that_is_seen(config, monkeypatch):
    worker = streaming(config)
    engine = worker.parts["rollout"].engine

    def fails(message):
        return Mock(side_effect=EngineError(message))

    monkeypatch.setattr(engine, "sleep", fails("requests are pending"), raising=False)
    polls = {"out of memory": fails("out of memory"), "requests are pending": engine._inner.poll}
    for seen, poll in polls.items():
        monkeypatch.setattr(engine, "poll", poll, raising=False)
        with pytest.raises(EngineError, match=seen):
            generate(worker)


def test_an_engine_has_its_servers_time(config, monkeypatch):
    limits, original = [], rollout_part.finished

    def noted(*args, **options):
        limits.append(options["stall_timeout_s"])
        return original(*args, **options)

    monkeypatch.setattr(rollout_part, "finished", noted)
    monkeypatch.setattr(rollout_part, "stall_timeout_s", lambda rollout: 4321.0)
    generate(streaming(config))
    assert limits == [4321.0]


def test_the_engine_is_closed_with_its_worker(config, monkeypatch):
    closed = []
    monkeypatch.setattr(HFEngine, "close", lambda engine: closed.append(id(engine)))
    worker = both(config)
    engine = id(worker.parts["rollout"].engine)
    generate(worker)
    assert not closed
    del worker
    gc.collect()
    assert closed == [engine]


def test_an_engine_that_takes_no_weights_is_refused_for_training(config, monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.own_weights.kinds_taken", lambda own: frozenset())
    with pytest.raises(ConfigError) as caught:
        both(config)
    assert caught.value.field == "actor_rollout_ref.rollout.name"


@pytest.fixture(scope="module")
def record(folder):
    return roles.on_ranks("weight_sync", folder, 2)


def test_a_fault_is_found_on_every_rank_that_has_it(record):
    assert record["digests"] == [(True, True)] * 2  # of the shards and of the whole
    first, second = record["stale gather"]
    assert first == "nothing" and re.match(f"{NAME}: {FAULTS['skipped'][1]}", second)
    assert record["shared"] == ["nothing", "nothing"]
    assert record["streamed"].pop("none") == [True, True]
    for fault, found in record["streamed"].items():
        assert [text.startswith(f"{NAME}: {NAME} ") for text in found] == [True, True], fault


def test_buckets_arrive_in_the_shards_and_a_missing_one_is_found(record):
    count, *found = record["apart"].values()
    assert count > 3
    assert found == [[f"None: bucket 2 of {count}, version 1"] * 2, ["nothing"] * 2, [True] * 2]
