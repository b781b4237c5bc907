"""Sequence parallelism and hybrid sharding on two and four ranks, compared with one rank."""

from pathlib import Path

import grid_job
import pytest
import synthetic
import torch

from tandem.engines.weight_sync import digest
from tandem.errors import ModelError
from tandem.models.collectives import CollectiveMeter
from tandem.models.sequence_parallel import SequenceSplit
from tests.support.ranks import run_ranks

JOB = Path(__file__).with_name("grid_job.py")
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}


def one_rank(folder, precision, kind):
    dtype = torch.float64 if precision == "fp64" else torch.float32
    engine = synthetic.make_engine(folder, precision=precision, kind=kind)
    loss = synthetic.ValueLoss() if kind == "value" else synthetic.SyntheticLoss("seq-mean-token-mean")
    batch, micro = synthetic.make_batch(dtype), synthetic.CUTS["all"]
    outputs = frozenset({"values"}) if kind == "value" else frozenset({"log_probs", "entropy"})
    metrics = [engine.train_step(batch, loss, micro=micro).to_floats() for _ in range(grid_job.STEPS)]
    found = engine.forward(batch, outputs=outputs, micro=micro)
    forward = {name: found.ragged(name).values for name in outputs}
    return forward, metrics, synthetic.weights(engine)


@pytest.fixture(scope="module")
def single(folder):
    cases = (("fp64", "policy"), ("fp32", "policy"), ("fp64", "value"))
    return {case: one_rank(folder, *case) for case in cases}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def record(folder, tmp_path_factory, request):
    results = tmp_path_factory.mktemp("grid") / "record.pt"
    run_ranks(JOB, folder, results, ranks=request.param, timeout=400)
    return torch.load(results, weights_only=False)


def test_every_division_trains_as_one_rank_does(single, record):
    for (precision, kind, sequence, copy), found in record.items():
        forward, metrics, weights = single[precision, kind]
        limit, case = TOLERANCE[precision], (precision, kind, sequence, copy)
        assert synthetic.relative_difference(found["forward"], forward) <= limit, case
        assert synthetic.relative_difference(found["weights"], weights) <= limit, case
        for mine, theirs in zip(found["metrics"], metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=limit, abs=limit), case
        assert (
            torch.equal(found["embedding"], found["weights"]["model.embed_tokens.weight"]) or kind == "value"
        )


def test_every_rank_has_the_digest_of_the_whole_weights(record):
    for case, found in record.items():
        expected = digest(found["weights"].items())
        assert all(other == expected for other in found["digests"]), case


def test_what_ranks_exchange_is_counted(record):
    counted = {case: found["collectives"][1] for case, found in record.items()}
    world = next(copy for _, _, sequence, copy in counted if sequence == 1)
    assert counted["fp64", "policy", 2, world] > counted["fp64", "policy", 1, world] > 0


def test_heads_that_do_not_divide_are_refused(folder):
    split = SequenceSplit(0, 3, None, CollectiveMeter())
    config = synthetic.make_engine(folder, frozen=True).module.decoder.config
    with pytest.raises(ModelError, match="3 devices, 4 heads") as refused:
        split.check(config)
    assert refused.value.field == "ulysses_sequence_parallel_size"
