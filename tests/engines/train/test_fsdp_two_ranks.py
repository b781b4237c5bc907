"""FSDP on two ranks: gradients of uneven shares, an error on one rank, and collectives by the byte."""

import itertools

import pytest
import torch.distributed as dist

from tandem.engines.train.base import MicroBatching
from tandem.engines.train.microbatch import cut_alike
from tandem.models.collectives import CollectiveMeter
from tests.engines.train import synthetic
from tests.engines.train.on_ranks import gathered, on_ranks, seven_or_three

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
PRECISIONS = {
    "fp64": {"model_dtype": "fp64", "dtype": "fp64"},
    "mixed": {"model_dtype": "fp32", "dtype": "bf16"},
}
CASES = [  # precision, rows of the first rank of ten, mode, cut
    *itertools.product(["fp64"], [7], synthetic.MODES, synthetic.CUTS),
    ("fp64", 10, "token-mean", "three"),
    ("fp64", 10, "seq-mean-token-mean", "all"),
    *itertools.product(["fp32"], [7], synthetic.MODES, ["three"]),
]


def all_gradients(folder, cases):
    engines = {name: synthetic.make_engine(folder, precision=name) for name in TOLERANCE}
    found = {}
    for precision, share, mode, cut in cases:
        mine, loss = seven_or_three(synthetic.batch_of(precision), share), synthetic.SyntheticLoss(mode)
        step = synthetic.gradients(engines[precision], mine, loss, synthetic.CUTS[cut])
        found[precision, share, mode, cut] = step
    return found


def cuts():
    """Return the sizes of both ranks' micro-batches of rows of 12 and 6 tokens, under two rules."""
    lengths = [12] * 5 if dist.get_rank() == 0 else [6] * 4
    rules = MicroBatching(max_tokens=30), MicroBatching(max_samples=2)
    return [gathered([len(rows) for rows in cut_alike(lengths, micro, CollectiveMeter())]) for micro in rules]


def non_finite(folder):
    loss = synthetic.SyntheticLoss(scale=float("nan") if dist.get_rank() == 1 else 1.0)
    try:
        synthetic.train(synthetic.make_engine(folder), seven_or_three(synthetic.make_batch()), loss=loss)
    except ArithmeticError as error:
        return f"{type(error).__name__} {error.field}"


def collectives(folder, precision):
    """Return the counted collectives of a forward and a step of one micro-batch, and sizes to check them."""
    batch = seven_or_three(synthetic.make_batch())
    model = {"gradient_checkpointing_mode": "full"}  # without a forward pass that measures the layers
    engine, found = synthetic.make_engine(folder, model=model, fsdp=PRECISIONS[precision]), {}
    found["warmed_up"] = engine.take_collectives()
    synthetic.output(engine, batch, cut="all")
    found["forward"] = engine.take_collectives()
    (metrics,) = synthetic.train(engine, batch, cut="all")
    found["step"] = engine.take_collectives()
    found["whole"] = sum(value.nbytes for _, value in engine.weights())
    found["weights"], found["left"] = engine.take_collectives(), engine.take_collectives()
    return found | {
        "numbers": {unit: synthetic.shard_numbers(p) for unit, p in synthetic.units(engine).items()},
        "metrics": len(metrics) - 2,  # grad_norm and lr need no exchange
        "own": sum(p.to_local().nbytes for p in engine.module.parameters()),
    }


def synchronized(folder, sync):
    engine = synthetic.make_engine(folder, fsdp={"gradient_sync": sync})
    batch, loss = seven_or_three(synthetic.make_batch()), synthetic.SyntheticLoss()
    engine.take_collectives()
    return *synthetic.gradients(engine, batch, loss, synthetic.CUTS["three"]), engine.take_collectives()[1]


def job(folder):
    return {
        "gradients": all_gradients(folder, CASES),
        "cuts": cuts(),
        "non_finite": non_finite(folder),
        "collectives": {precision: collectives(folder, precision) for precision in PRECISIONS},
        "synchronized": {sync: synchronized(folder, sync) for sync in ("once", "each")},
    }


@pytest.fixture(scope="module")
def single(folder):
    found = all_gradients(folder, itertools.product(TOLERANCE, [10], synthetic.MODES, ["all"]))
    return {(precision, mode): step for (precision, _, mode, _), step in found.items()}


@pytest.fixture(scope="module")
def pair(folder):
    return on_ranks(job, folder)


def test_gradients_and_metrics_equal_one_rank(single, pair):
    for found in pair:
        for (precision, share, mode, cut), (gradient, metrics) in found["gradients"].items():
            wanted, wanted_metrics = single[precision, mode]
            gap = synthetic.relative_difference(gradient, wanted)
            assert gap <= TOLERANCE[precision], (precision, share, mode, cut, gap)
            assert metrics == pytest.approx(wanted_metrics, rel=TOLERANCE[precision]), (share, mode, cut)


def test_the_rank_with_fewer_tokens_cuts_them_as_often(pair):
    """With a limit on samples, the second rank gets an empty micro-batch."""
    assert pair[0]["cuts"] == [[[2, 2, 1], [1, 2, 1]], [[2, 2, 1], [2, 2, 0]]]


def test_every_rank_reports_a_loss_that_is_bad_on_one(pair):
    assert [found["non_finite"] for found in pair] == ["NonFiniteError loss"] * 2


@pytest.mark.parametrize(("precision", "gathered", "reduced"), [("fp64", 8, 8), ("mixed", 2, 4)])
def test_collectives_are_counted_to_the_byte(pair, precision, gathered, reduced):
    """A rank receives one other shard. Layers are gathered in the forward and the backward, the root once."""
    found = pair[0]["collectives"][precision]
    everything = sum(found["numbers"].values())
    layers = everything - found["numbers"]["root"]
    assert found["forward"][1] == everything * gathered + 8  # and the number of micro-batches
    in_step = 8 + 16 + 8 + 16 * found["metrics"]  # micro-batches; tokens and sequences; the loss itself
    assert found["step"][1] == (everything + layers) * gathered + everything * reduced + in_step
    assert found["weights"][1] == found["whole"] - found["own"]
    assert found["left"] == (0.0, 0)
    for phase in ("warmed_up", "forward", "step", "weights"):
        assert 0 < found[phase][0] < 60


def test_gradients_reduced_in_each_micro_batch_are_the_same(single, pair):
    """Three micro-batches gather all weights and reduce all gradients twice more than one reduction does."""
    once, each = (pair[0]["synchronized"][sync] for sync in ("once", "each"))
    wanted, metrics = single["fp64", "token-mean"]
    assert synthetic.relative_difference(each[0], wanted) <= 1e-9
    assert each[1] == pytest.approx(metrics, rel=1e-9)
    assert each[2] - once[2] == 2 * 2 * 8 * sum(pair[0]["collectives"]["fp64"]["numbers"].values())
