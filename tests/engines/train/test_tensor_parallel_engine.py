"""Layers split over ranks, alone and under FSDP; two and four ranks are compared with one."""

from pathlib import Path

import pytest
import split_models
import synthetic
import torch

from tandem.engines.weight_sync import digest
from tests.support.ranks import run_ranks

JOB = Path(__file__).with_name("split_job.py")
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return split_models.save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def single(models):
    """Return a function that gives starting weights, metrics, outputs and weights of one rank."""
    found = {}

    def trained(name, kind, precision):
        if (name, kind, precision) not in found:
            engine = synthetic.make_engine(models / name, kind=kind, precision=precision)
            started = synthetic.weights(engine)
            metrics, forward = split_models.train(engine, split_models.batch_of(precision), kind)
            found[name, kind, precision] = started, metrics, forward, synthetic.weights(engine)
        return found[name, kind, precision]

    return trained


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """Return checkpoints of one rank after one step, and the weights after the second."""
    folder, after = tmp_path_factory.mktemp("saved"), {}
    for name in split_models.SAVED[4]:
        engine = synthetic.make_engine(models / name)
        split_models.train(engine, split_models.batch_of("fp64"), "policy", steps=1)
        engine.save(folder / name)
        split_models.train(engine, split_models.batch_of("fp64"), "policy", steps=1)
        after[name] = synthetic.weights(engine)
    return folder, after


@pytest.fixture(
    scope="module",
    params=["2 core", *(pytest.param(case, marks=pytest.mark.slow) for case in ("2 all", "4 all"))],
)
def job(models, saved, tmp_path_factory, request):
    results = tmp_path_factory.mktemp("split")
    ranks, cases = request.param.split()
    run_ranks(JOB, models, saved[0], results, cases, ranks=int(ranks), timeout=500)
    return results, torch.load(results / "record.pt", weights_only=False)


def test_steps_equal_one_rank(single, job):
    for case, found in job[1]["trained"].items():
        started, metrics, forward, weights = single(*case[:3])
        limit = TOLERANCE[case[2]]
        assert all(torch.equal(found["started"][name], value) for name, value in started.items()), case
        assert found["shapes"] == {name: value.shape for name, value in started.items()}, case
        for mine, theirs in zip(found["metrics"], metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=limit, abs=limit), case
        assert synthetic.relative_difference(found["forward"], forward) <= limit, case
        assert synthetic.relative_difference(found["weights"], weights) <= limit, case


@pytest.mark.parametrize("way", ["recomputed", "offloaded"])
def test_the_way_to_keep_activations_changes_nothing(models, job, way):
    engine = synthetic.make_engine(models / "qwen2")
    wanted, _ = split_models.train(engine, split_models.batch_of("fp64"), "policy", steps=1)
    metrics, weights = job[1][way]
    assert metrics[0].get("activation_offload_bytes", 0) > 0 or way == "recomputed"
    metrics = [{name: metrics[0][name] for name in wanted[0]}]
    assert metrics == [pytest.approx(wanted[0], rel=1e-9, abs=1e-9)]
    assert synthetic.relative_difference(weights, synthetic.weights(engine)) <= 1e-9


def test_bf16_is_near_one_rank(models, job):
    engine = synthetic.make_engine(models / "qwen2", fsdp=split_models.MIXED)
    [wanted], _ = split_models.train(engine, split_models.batch_of("fp64"), "policy", steps=1)
    [found], _ = job[1]["mixed"]
    assert found["entropy"] == pytest.approx(wanted["entropy"], rel=0.01)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)


def test_scores_equal_one_rank(models, job):
    engine = synthetic.make_engine(models / "scorer", kind="score", frozen=True)
    batch, outputs = split_models.batch_of("fp64"), frozenset({"scores"})
    wanted = engine.forward(batch, outputs=outputs, micro=synthetic.CUTS["all"]).ragged("scores").values
    assert wanted.abs().max() > 0.1
    assert torch.allclose(job[1]["scored"], wanted, rtol=0, atol=1e-9)


def test_every_rank_has_the_digest_of_the_whole_weights(job):
    for case, found in job[1]["trained"].items():
        whole = digest(found["weights"].items())
        half = digest((name, value.bfloat16()) for name, value in found["weights"].items())
        assert all(other == whole for other in found["digests"]), case
        assert all(other == half for other in found["half"]), case


def test_what_ranks_hold_alike_stays_alike(job):
    """The norms, of which several ranks hold the same shard, stay equal bit by bit."""
    for case, found in job[1]["trained"].items():
        first = dict(reversed(found["replicas"]))
        assert len(first[0]) >= 5, case
        assert all(sums == first[shard] for shard, sums in found["replicas"]), case


def test_ranks_hold_parts_and_exchanges_are_counted(job):
    for case, found in job[1]["trained"].items():
        if case[2] == "fp64" and case[4] == -1:
            info = found["info"]
            whole, ranks = info["parameters"] * 8, info["world_size"]
            assert whole / ranks <= info["parameters@cpu"] <= 1.25 * whole / ranks, case
        seconds, received = found["collectives"]
        assert seconds > 0 and received > 0


def test_weights_of_another_division_arrive_whole(job):
    found = job[1]["exchanged"]
    assert found["version"] == 7
    assert all(torch.equal(found["loaded"][name], value) for name, value in found["exported"].items())
    assert all(found["same_digest"])


def test_checkpoints_go_from_any_division_to_any_other(saved, job, models):
    results, record = job
    names = {name for name, *_ in record["resumed"]}
    into = {label for *_, label in record["resumed"]}
    assert "split" in into
    assert len(record["resumed"]) == len(names) * 3 * len(into)
    for (name, source, label), (weights, version) in record["resumed"].items():
        assert version == 2
        assert synthetic.relative_difference(weights, saved[1][name]) <= 1e-9, (name, source, label)
    for name in names:
        engine = synthetic.make_engine(models / name)
        engine.load(results / f"{name}_split")
        split_models.train(engine, split_models.batch_of("fp64"), "policy", steps=1)
        assert synthetic.relative_difference(synthetic.weights(engine), saved[1][name]) <= 1e-9


def test_what_cannot_be_split_is_refused_by_name(job):
    said = job[1]["refusals"]
    assert said["unshards"] is False
    assert "fsdp_config.tensor_parallel_size" in said["unsharded"]
    assert "tensor_parallel_size" in said["qwen2", 3] and "3 of " in said["qwen2", 3]
    if ("qwen2", 4) in said and "ranks" not in said["qwen2", 4]:
        assert "num_key_value_heads=2" in said["qwen2", 4]
