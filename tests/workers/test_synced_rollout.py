import gc
import re
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tandem.engines.rollout.base import SLEEP_TAGS
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.weight_sync import WeightSyncError
from tandem.errors import ConfigError, EngineError
from tandem.protocol import DataProto
from tandem.workers import actor_part, rollout_part
from tests.workers import roles
from tests.workers.streamed import FAULTS, NAME, TWIN, StreamedEngine

PROMPTS = roles.make_prompts(3)
MIXED = (
    "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
    "actor_rollout_ref.actor.fsdp_config.dtype=bf16",
)
SMALL = "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return roles.make_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(folder, tmp_path):
    return roles.make_config(
        folder, f"trainer.default_local_dir={tmp_path}", "actor_rollout_ref.rollout.name=hf", SMALL
    )


def streaming(config: Any, *parts: str) -> Any:
    """Return a worker whose rollout engine receives streams."""
    worker = roles.make_actor(config, *parts)
    dtype = worker.parts["rollout"].policy.compute_dtype
    worker.parts["rollout"].engine = StreamedEngine(config.actor_rollout_ref.model.path, dtype)
    return worker


def generate(worker: Any) -> DataProto:
    return worker.generate_sequences(PROMPTS, 2, roles.PARAMS)


def same(first: DataProto, second: DataProto) -> bool:
    """Return whether tokens are equal, and log-probs equal except for the last bits.

    The last bits depend on the tensors' addresses in memory.
    """
    a, b = (batch.ragged("rollout_log_probs").values for batch in (first, second))
    return first.ragged("tokens").equal(second.ragged("tokens")) and torch.allclose(a, b, rtol=0, atol=1e-12)


def learn(worker: Any, batch: DataProto) -> None:
    batch = roles.with_targets(batch)
    old = worker.compute_log_prob(batch)
    worker.update_actor(batch.union(old, old.rename("old_log_probs", "ref_log_probs")))


def test_a_streamed_engine_writes_what_one_that_shares_the_module_writes(config):
    shared, streamed = roles.make_actor(config, "actor", "rollout"), streaming(config, "actor", "rollout")
    for _ in range(2):
        batch, other = generate(shared), generate(streamed)
        assert same(batch, other)
        learn(shared, batch)
        learn(streamed, other)
    assert streamed.take_timings()["timing/weight_sync"] > 0


def test_a_stream_leaves_the_trained_weights_sharded_and_idle(config, monkeypatch):
    worker = streaming(config, "actor", "rollout")
    calls: list[str] = []
    for name in ("onload", "offload", "unsharded"):
        original = getattr(worker.actor, name)
        monkeypatch.setattr(
            worker.actor,
            name,
            lambda *args, name=name, original=original, **options: (
                calls.append(name),
                original(*args, **options),
            )[1],
        )
    poll = worker.parts["rollout"].engine.poll
    worker.parts["rollout"].engine.poll = lambda timeout_s: (calls.append("poll"), poll(timeout_s))[1]
    generate(worker)
    assert calls[:3] == ["onload", "offload", "poll"]
    assert "unsharded" not in calls


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_stream_is_named(config, fault):
    worker = streaming(config, "actor", "rollout")
    learn(worker, generate(worker))
    worker.parts["rollout"].engine.fault, told = FAULTS[fault]
    with pytest.raises(WeightSyncError, match="version 1 in the rollout engine hf") as caught:
        generate(worker)
    assert re.match(told, str(caught.value.got)), caught.value.got
    assert caught.value.field == NAME
    worker.parts["rollout"].engine.fault = None
    generate(worker)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_pools_is_named(config, fault):
    actor, apart = roles.make_actor(config, "actor", "rollout"), roles.make_actor(config, "rollout")
    transfer(actor, apart)
    learn(actor, generate(actor))
    damage, told = FAULTS[fault]
    with pytest.raises(WeightSyncError, match="version 1") as caught:
        transfer(
            actor, apart, lambda bucket: replace(bucket, tensors=dict(damage(iter(bucket.tensors.items()))))
        )
    assert re.match(told, str(caught.value.got)), caught.value.got
    transfer(actor, apart)
    assert same(generate(apart), generate(actor))


def transfer(actor: Any, apart: Any, change: Any = lambda bucket: bucket) -> None:
    for number in range(actor.weight_buckets()):
        apart.load_weights(change(actor.export_weights(number)))


def test_a_bucket_of_old_weights_is_refused(config, monkeypatch):
    names = list(roles.make_actor(config, "actor").actor.weight_shapes)
    monkeypatch.setattr(actor_part, "buckets", lambda sizes, limit: [tuple(names[:5]), tuple(names[5:])])
    actor, apart = roles.make_actor(config, "actor", "rollout"), roles.make_actor(config, "rollout")
    assert actor.weight_buckets() == 2
    old = actor.export_weights(0)
    assert list(old.tensors) == names[:5] and old.sent is None
    learn(actor, generate(actor))
    apart.load_weights(old)
    with pytest.raises(WeightSyncError, match="out of order"):
        apart.load_weights(actor.export_weights(1))


@pytest.mark.parametrize("fault", ["stale", "swapped", "damaged"])
def test_a_fault_in_the_shared_module_is_named(folder, tmp_path, monkeypatch, fault):
    """With bf16 over fp32, the unsharded weights are a copy that can be wrong."""
    words = (f"trainer.default_local_dir={tmp_path}", "actor_rollout_ref.rollout.name=hf")
    worker = roles.make_actor(roles.make_config(folder, *words, *MIXED), "actor", "rollout")
    batch = generate(worker)
    old = {name: value.clone() for name, value in worker.actor.weights(dtype=torch.bfloat16)}
    learn(worker, batch)
    original = worker.actor.unsharded

    @contextmanager
    def faulty():
        with original() as module:
            parameters = {name: parameter.data for name, parameter in module.named_parameters()}
            if fault == "stale":
                parameters[NAME].copy_(old[NAME])
            elif fault == "swapped":
                kept = parameters[NAME].clone()
                parameters[NAME].copy_(parameters[TWIN])
                parameters[TWIN].copy_(kept)
            else:
                parameters[NAME][0, 0] = 7
            yield module

    monkeypatch.setattr(worker.actor, "unsharded", faulty)
    with pytest.raises(WeightSyncError) as caught:
        generate(worker)
    told = {
        "stale": "is still that of version 0",
        "swapped": f"is the weight {TWIN}",
        "damaged": "is damaged",
    }
    assert f"{NAME} " in str(caught.value.got) and told[fault] in str(caught.value.got)
    monkeypatch.setattr(worker.actor, "unsharded", original)
    generate(worker)


def test_a_module_that_the_engine_has_copied_is_sharded_again_before_it_samples(
    folder, tmp_path, monkeypatch
):
    """This is the case on CUDA, where the native engine has packed copies of the weights."""
    config = roles.make_config(folder, f"trainer.default_local_dir={tmp_path}")
    worker, plain = (roles.make_actor(config, "actor", "rollout") for _ in range(2))
    engine, actor = worker.parts["rollout"].engine, worker.actor
    monkeypatch.setattr(engine, "_copies", lambda source, runner: True)
    poll, kept, offload = engine.poll, list[bool](), actor.offload
    offloads = list[bool]()

    def watched(timeout_s):
        kept.append(any(not isinstance(p, DTensor) for p in actor.module.parameters()))
        assert offloads
        return poll(timeout_s)

    monkeypatch.setattr(engine, "poll", watched)
    monkeypatch.setattr(actor, "offload", lambda: (offloads.append(True), offload()))
    for _ in range(2):
        batch = generate(worker)
        assert same(batch, generate(plain))
        learn(worker, batch)
        learn(plain, batch)
        offloads.clear()
    assert kept and not any(kept)


@pytest.mark.parametrize(("free", "tags"), [(True, SLEEP_TAGS), (False, ("weights",))])
def test_memory_is_given_back_after_generation_as_the_config_says(folder, tmp_path, monkeypatch, free, tags):
    words = (f"trainer.default_local_dir={tmp_path}", "actor_rollout_ref.rollout.name=hf")
    free_cache = f"actor_rollout_ref.rollout.free_cache_engine={str(free).lower()}"
    config = roles.make_config(folder, *words, free_cache)
    slept: list[Any] = []
    for worker in (roles.make_actor(config, "actor", "rollout"), streaming(config, "actor", "rollout")):
        monkeypatch.setattr(worker.parts["rollout"].engine, "sleep", slept.append)
        generate(worker)
    assert slept == ([tags, SLEEP_TAGS] if free else [tags])


def test_the_first_error_is_the_one_that_is_seen(config, monkeypatch):
    """A second error, from putting the engine to sleep, is not shown."""
    worker = streaming(config, "actor", "rollout")

    def fails(message):
        def call(*_, **__):
            raise EngineError(message)

        return call

    monkeypatch.setattr(worker.parts["rollout"].engine, "poll", fails("out of memory"), raising=False)
    monkeypatch.setattr(worker.parts["rollout"].engine, "sleep", fails("requests are pending"), raising=False)
    with pytest.raises(EngineError, match="out of memory"):
        generate(worker)
    monkeypatch.setattr(
        worker.parts["rollout"].engine, "poll", worker.parts["rollout"].engine._inner.poll, raising=False
    )
    with pytest.raises(EngineError, match="requests are pending"):  # if it is the first error, it is shown
        generate(worker)


def test_an_engine_has_its_servers_time(config, monkeypatch):
    limits: list[float] = []
    original = rollout_part.finished

    def noted(*args, **options):
        limits.append(options["stall_timeout_s"])
        return original(*args, **options)

    monkeypatch.setattr(rollout_part, "finished", noted)
    monkeypatch.setattr(rollout_part, "stall_timeout_s", lambda rollout: 4321.0)
    generate(streaming(config, "actor", "rollout"))
    assert limits == [4321.0]


def test_the_engine_is_closed_with_its_worker(config, monkeypatch):
    closed: list[int] = []
    monkeypatch.setattr(HFEngine, "close", lambda engine: closed.append(id(engine)))
    worker = roles.make_actor(config, "actor", "rollout")
    engine = id(worker.parts["rollout"].engine)
    generate(worker)
    assert not closed
    del worker
    gc.collect()
    assert closed == [engine]


def test_an_engine_that_takes_no_weights_is_refused_for_training(config, monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.own_weights.kinds_taken", lambda own: frozenset())
    with pytest.raises(ConfigError, match="cannot receive new weights") as caught:
        roles.make_actor(config, "actor", "rollout")
    assert caught.value.field == "actor_rollout_ref.rollout.name"
