"""Layers in pipeline stages, alone and with FSDP, tensor and sequence parallelism.

Two and four ranks are compared with one rank in this process.
"""

from pathlib import Path

import pipeline_models
import pytest
import split_models
import synthetic
import torch

from tandem.engines.weight_sync import digest
from tests.support.ranks import run_ranks

HERE = Path(__file__).parent
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return pipeline_models.save_models(tmp_path_factory.mktemp("models"))


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
def two_steps(models):
    """Return a function that gives metrics and weights of one rank after two steps."""

    def trained(name, **options):
        engine = synthetic.make_engine(models / name, **options)
        metrics, _ = split_models.train(engine, split_models.batch_of("fp64"), "policy", steps=2)
        return metrics, synthetic.weights(engine)

    return trained


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """Return checkpoints of one rank after one step, and the weights after the second."""
    folder, after = tmp_path_factory.mktemp("saved"), {}
    for name in ("qwen2", "qwen3"):
        engine = synthetic.make_engine(models / name)
        split_models.train(engine, split_models.batch_of("fp64"), "policy", steps=1)
        engine.save(folder / name)
        split_models.train(engine, split_models.batch_of("fp64"), "policy", steps=1)
        after[name] = synthetic.weights(engine)
    return folder, after


@pytest.fixture(
    scope="module",
    params=["2 CORE", *(pytest.param(case, marks=pytest.mark.slow) for case in ("2 CASES", "4 ON_FOUR"))],
)
def job(models, saved, tmp_path_factory, request):
    results = tmp_path_factory.mktemp("stages")
    ranks, cases = request.param.split()
    run_ranks(HERE / "pipeline_job.py", models, saved[0], results, cases, ranks=int(ranks), timeout=500)
    return results, torch.load(results / "record.pt", weights_only=False), getattr(pipeline_models, cases)


def same(found, wanted, what=None, limit=1e-9):
    """Check that metrics and weights of some steps are equal within the limit."""
    for mine, theirs in zip(found[0], wanted[0], strict=True):
        assert mine == pytest.approx(theirs, rel=limit, abs=limit), what
    assert synthetic.relative_difference(found[1], wanted[1]) <= limit, what


def test_steps_equal_one_rank(single, job):
    for name, found in job[1]["trained"].items():
        case = job[2][name]
        started, metrics, forward, weights = single(*case[:3])
        limit = TOLERANCE[case[2]]
        assert all(torch.equal(found["started"][key], value) for key, value in started.items()), name
        assert found["shapes"] == {key: value.shape for key, value in started.items()}, name
        same((found["metrics"], found["weights"]), (metrics, weights), name, limit)
        assert synthetic.relative_difference(found["forward"], forward) <= limit, name


def test_all_ranks_say_the_same(job):
    for name, found in job[1]["trained"].items():
        assert found["same_metrics"] and found["same_forward"], name
        first = found["same_weights"][0]
        assert [key for key, _ in first] == list(found["shapes"]), name
        assert all(other == first for other in found["same_weights"]), name


def test_every_rank_has_the_digest_of_the_whole_weights(job):
    for name, found in job[1]["trained"].items():
        whole = digest(found["weights"].items())
        half = digest((key, value.bfloat16()) for key, value in found["weights"].items())
        assert all(other == whole for other in found["digests"]), name
        assert all(other == half for other in found["half"]), name


def test_a_tied_embedding_stays_one_bit_by_bit(job):
    """If tied, the first and the last stage hold the embedding; if not, only the first stage does."""
    for name, found in job[1]["trained"].items():
        ranks, stages = len(found["infos"]), job[2][name][3]["pipeline_parallel_size"]
        tied = job[2][name][0] in ("qwen2", "deep") and job[2][name][1] == "policy"
        assert len(found["embeddings"]) == ranks // stages * (2 if tied else 1), name
        assert len(dict(found["embeddings"])) == len(set(found["embeddings"])), name


def test_each_rank_holds_its_part(job):
    for name, found in job[1]["trained"].items():
        model, kind, precision, fsdp, _ = job[2][name]
        if precision != "fp64" or "fsdp_size" in fsdp:
            continue
        sizes = {key: value.numel() for key, value in found["weights"].items()}
        twice = sizes["model.embed_tokens.weight"] if model in ("qwen2", "deep") and kind == "policy" else 0
        held = sum(info["parameters@cpu"] for info in found["infos"]) / 8
        assert all(info["parameters"] == sum(sizes.values()) for info in found["infos"]), name
        shards = len(found["infos"]) // fsdp["pipeline_parallel_size"]
        alike = sum(n for key, n in sizes.items() if "norm" in key) if "tensor_parallel_size" in fsdp else 0
        assert sum(sizes.values()) + twice <= held + 1 <= sum(sizes.values()) + twice + shards * alike + 1, (
            name
        )
        most = max(info["parameters@cpu"] for info in found["infos"]) / 8
        assert most <= 0.75 * sum(sizes.values()), name
        assert found["collectives"][0] > 0 and found["collectives"][1] > 0


def test_however_rows_are_cut(two_steps, job):
    wanted = two_steps("qwen2")
    for name, found in job[1]["lots"].items():
        same(found, wanted, name)
    same(job[1]["empty"], wanted)


def test_gradients_reduced_in_each_micro_batch_are_the_same(two_steps, job):
    same(job[1]["each"], two_steps("qwen2"))


def test_recomputed_activations_change_nothing(two_steps, job):
    same(job[1]["recomputed"], two_steps("deep"))


def test_other_optimizers(two_steps, job):
    same(job[1]["muon"], two_steps("qwen2", **pipeline_models.MUON))


def test_bf16_is_near_one_rank(two_steps, job):
    wanted, found = two_steps("qwen2", fsdp=split_models.MIXED)[0], job[1]["mixed"][0]
    assert found[0]["entropy"] == pytest.approx(wanted[0]["entropy"], rel=0.01)
    assert found[0]["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=0.1)


def test_scores_equal_one_rank(models, job):
    engine = synthetic.make_engine(models / "scorer", kind="score", frozen=True)
    batch, outputs = split_models.batch_of("fp64"), frozenset({"scores"})
    wanted = engine.forward(batch, outputs=outputs, micro=synthetic.CUTS["all"]).ragged("scores").values
    assert wanted.abs().max() > 0.1
    assert torch.allclose(job[1]["scored"], wanted, rtol=0, atol=1e-9)


def test_weights_of_another_division_arrive_whole(job):
    found = job[1]["exchanged"]
    assert found["version"] == 7
    assert list(found["loaded"]) == list(found["exported"])
    assert all(torch.equal(found["loaded"][name], value) for name, value in found["exported"].items())
    assert found["some"] == list(found["exported"])[3:5]
    assert all(found["same_digest"])
    first = next(iter(found["exported"]))
    for said in found["said"]:
        assert said["missing"].startswith(f"{first}: ") and "missing" in said["missing"]
        assert said["unknown"].startswith("model.more: ") and "unknown" in said["unknown"]


def test_each_stage_reads_its_own_layers(job):
    """Of five layers, the first of two stages has three."""
    for stage, names in job[1]["read"]:
        layers = {int(name.split(".")[2]) for name in names if ".layers." in name}
        assert layers == ({3, 4} if stage else {0, 1, 2})
        rest = {name for name in names if ".layers." not in name}
        assert rest == {"model.embed_tokens.weight"} | ({"model.norm.weight"} if stage else set())


def test_checkpoints_go_from_any_division_to_any_other(saved, job, models):
    results, record, _ = job
    names = {name for name, _, _ in record["resumed"]}
    into = {label for _, _, label in record["resumed"]}
    assert "staged" in into
    assert len(record["resumed"]) == len(names) * 3 * len(into)
    for (name, source, label), (weights, version) in record["resumed"].items():
        assert version == 2
        assert synthetic.relative_difference(weights, saved[1][name]) <= 1e-9, (name, source, label)
    for name in names:
        engine = synthetic.make_engine(models / name)
        engine.load(results / f"{name}_staged")
        split_models.train(engine, split_models.batch_of("fp64"), "policy", steps=1)
        assert synthetic.relative_difference(synthetic.weights(engine), saved[1][name]) <= 1e-9


def test_what_cannot_be_done_is_refused_on_all_ranks(job):
    for said in job[1]["refusals"]:
        assert said["unshards"] is False
        assert "fsdp_config.pipeline_parallel_size" in said["unsharded"]
        assert "a policy model does not have this output" in said["output"]
        field, words = said["ranks"]
        assert field == "fsdp_config.pipeline_parallel_size" and "3 of " in words
        field, words = said["layers"]
        assert field == "fsdp_config.pipeline_parallel_size"
        assert "4, num_hidden_layers=2" in words or "4 of 2 ranks" in words
        assert said["activations"][0] == "model.enable_activation_offload"


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_others_in_limited_time(models, tmp_path):
    run_ranks(HERE / "broken_stage_job.py", models / "qwen2", tmp_path)
    (first, waited), (last, _) = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert last == "DataError: the loss does not like it"
    assert first.startswith(("RuntimeError", "DistBackendError", "TimeoutError")) and waited < 60
