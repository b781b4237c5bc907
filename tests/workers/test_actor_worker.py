import functools
import pickle
import time
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tandem.errors import EngineError
from tandem.observability.run import RunFolder
from tandem.observability.timers import read_timeline
from tandem.protocol import DataProto, Ragged, SamplingParams
from tandem.runtime import LocalBackend, ResourcePool, WorkerGroup
from tandem.runtime.worker import create
from tandem.workers.base import EngineWorker, TimedWorker
from tandem.workers.samples import requests_of
from tests.workers import roles

PROMPTS = roles.make_prompts(6)
LONG = SamplingParams(temperature=1.0, max_tokens=6, seed=3)


@pytest.fixture
def config(folder, tmp_path):
    # two rows at a time, so that samples finish at different times
    return roles.make_config(folder, "actor_rollout_ref.rollout.max_num_seqs=2", run=tmp_path)


@pytest.fixture
def worker(config):
    return roles.make_actor(config, "actor", "rollout")


@pytest.mark.parametrize("parts", [("actor",), ("rollout",), ("ref",), ("actor", "ref"), ("rollout", "ref")])
def test_a_part_does_its_work_and_refuses_that_of_others(config, worker, parts):
    batch = worker.generate_sequences(PROMPTS, 1, LONG)
    alone = roles.make_actor(config, *parts)
    assert set(alone.engines) == set(parts)
    old = worker.compute_log_prob(batch).ragged("old_log_probs")
    calls = {
        "rollout": (lambda: alone.generate_sequences(PROMPTS, 1, LONG), "tokens", batch.ragged("tokens")),
        "actor": (lambda: alone.compute_log_prob(batch), "old_log_probs", old),
        "ref": (lambda: alone.compute_ref_log_prob(batch), "ref_log_probs", old),
    }
    for part, (call, name, wanted) in calls.items():
        if part in parts:
            assert call().ragged(name).equal(wanted)
        else:
            with pytest.raises(EngineError):
                call()
    events = read_timeline(Path(config.trainer.default_local_dir) / "timeline.json")
    tracks = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert tracks == ["actor rank 0", f"{parts[0]} rank 0"]


def test_a_frozen_rollout_follows_the_actor(config, worker):
    batch = roles.with_log_probs(worker, worker.generate_sequences(PROMPTS, 1, LONG))
    apart = roles.make_actor(config, "rollout")
    worker.update_actor(batch)
    buckets = [worker.export_weights(number) for number in range(worker.weight_buckets())]
    worker.update_actor(batch)  # the exported weights are a copy
    for bucket in buckets:
        apart.load_weights(pickle.loads(pickle.dumps(bucket)))  # as if sent between processes
    assert apart.engines["rollout"].version == buckets[0].version == 1
    exported = {name: value for bucket in buckets for name, value in bucket.tensors.items()}
    found = dict(apart.engines["rollout"].weights())
    assert set(found) == set(exported)
    assert all(torch.equal(value, exported[name]) for name, value in found.items())
    assert roles.versions(apart.generate_sequences(PROMPTS, 1, LONG)) == {1}
    with pytest.raises(EngineError):
        worker.load_weights(buckets[0])


def test_a_stream_gives_quarters_and_does_not_count_its_readers_time(worker):
    whole = worker.generate_sequences(PROMPTS, 4, LONG)
    worker.take_timings()
    parts = []
    start = time.perf_counter()
    for part in worker.stream_sequences(PROMPTS, 4, LONG):
        parts.append(part)
        time.sleep(0.5)
    assert 3 <= len(parts) <= 4 and all(len(part.rows) >= 6 for part in parts[:-1])
    elapsed = time.perf_counter() - start
    order = np.argsort([row for part in parts for row in part.rows])
    assert roles.equal(DataProto.concat([part.batch for part in parts])[order.tolist()], whole)
    timings = worker.take_timings()
    assert timings["timing/generate_sequences"] + timings["timing/reshard"] <= timings["timing/gen"]
    assert 0 < timings["timing/gen"] <= elapsed - 0.5 * len(parts)
    assert worker.take_observed().to_floats()["rollout/generated_tokens"] == 2 * 24 * 6


@pytest.mark.parametrize("how", ["left", "broken"])
def test_a_stream_that_ends_early_leaves_nothing_behind(worker, monkeypatch, how):
    stream, engine = worker.stream_sequences(PROMPTS, 4, LONG), worker.parts["rollout"].engine
    next(stream)
    if how == "left":
        stream.close()
    else:
        with monkeypatch.context() as patched:
            patched.setattr(engine, "poll", lambda timeout_s: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(stream)
    assert engine.pending() == 0
    info = worker.actor.state_info()
    assert info["parameters@cpu"] == 8 * info["parameters"]
    fresh = worker.generate_sequences(PROMPTS, 1, LONG)
    assert roles.gap(fresh.union(worker.compute_log_prob(fresh))) <= 1e-9


def test_a_group_streams_into_futures(config):
    made = roles.make_actor(config, "actor", "rollout")
    wanted = made.generate_sequences(PROMPTS, 2, LONG)
    factory = roles.actor_factory(config, "actor", "rollout")
    group = WorkerGroup(LocalBackend(), factory, ResourcePool([1]), balance=True)
    columns = ("tokens", "uid", "sample", "rollout_log_probs", "response_mask")
    batch = group.stream_sequences(PROMPTS, 2, LONG).map(lambda part: part.select(*columns))
    found = batch.get()
    assert found.ragged("tokens").equal(wanted.ragged("tokens"))
    assert list(found.non_tensor_batch["sample"]) == [0, 1] * 6
    old = group.compute_log_prob(batch).get().ragged("old_log_probs")
    assert old.equal(made.compute_log_prob(wanted).ragged("old_log_probs"))


def test_truncated_sampling_keeps_both_columns(worker):
    params = SamplingParams(temperature=1.0, top_k=5, max_tokens=6, seed=3)
    for prompts in (PROMPTS, PROMPTS[:0]):
        batch = worker.generate_sequences(prompts, 2, params)
        mask = batch.ragged("response_mask").values
        cut, whole = (
            batch.ragged(name).values[mask] for name in ("rollout_log_probs", "rollout_log_probs_untruncated")
        )
        assert cut.dtype == whole.dtype == torch.float64
        assert len(cut) == 72 * bool(len(prompts)) and bool((cut > whole).all())


def test_of_several_ranks_the_user_hears_the_first_and_the_log_has_all(tmp_path):
    heard, run = [], RunFolder(tmp_path)
    for rank in range(2):
        made = create(functools.partial(TimedWorker, run, "critic"), rank, 2, tell=heard.append)
        made.say(f"cache {rank}")
    assert heard == ["cache 0"]
    lines = (run.logs / "run.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["[critic rank 0] cache 0", "[critic rank 1] cache 1"]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_on_cuda_the_kernels_of_each_engine_are_named(kind):
    said = []
    worker = Mock(engines={}, device=torch.device(kind), say=said.append)
    for role in ("actor", "critic"):
        engine = Mock(kernels=f"layers of {role}", share=Mock(rank=0, size=1, leads=True))
        engine.state_info.return_value = {"trainable_parameters": 7, "parameters": 7}
        assert EngineWorker.hold(worker, role, engine) is engine
    assert said == (["actor: layers of actor.", "critic: layers of critic."] if kind == "cuda" else [])


def test_a_response_ends_where_the_longest_sequence_does():
    table = DataProto({"prompts": Ragged.from_lengths(torch.arange(9), [2, 7])}, {"uid": ["short", "long"]})
    params = SamplingParams(max_tokens=6, min_tokens=4)
    requests = requests_of(table, 2, params, longest=10)
    assert [(request.uid, request.sample) for request in requests] == [*product(["short", "long"], [0, 1])]
    assert [request.params.max_tokens for request in requests] == [6, 6, 3, 3]
    assert [request.params.min_tokens for request in requests] == [4, 4, 3, 3]
    assert requests[0].params is params
