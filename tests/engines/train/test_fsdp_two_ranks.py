"""FSDP on two ranks, compared with one rank in this process."""

from pathlib import Path

import pytest
import synthetic
import torch

from tests.support.ranks import run_ranks

JOB = Path(__file__).with_name("two_rank_job.py")
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}


@pytest.fixture(scope="module")
def single(folder, tmp_path_factory):
    """Return the results of one rank.

    They are gradients of the whole batch, weights after two steps, and a checkpoint after the first step.
    """
    saved = tmp_path_factory.mktemp("one_rank")
    loss, micro = synthetic.SyntheticLoss(), synthetic.CUTS["all"]
    gradients = {}
    for precision in TOLERANCE:
        engine = synthetic.make_engine(folder, precision=precision)
        batch = synthetic.make_batch(torch.float64 if precision == "fp64" else torch.float32)
        for mode in synthetic.MODES:
            step = synthetic.gradients(engine, batch, synthetic.SyntheticLoss(mode), micro)
            gradients[precision, mode] = step
    engine = synthetic.make_engine(folder)
    batch = synthetic.make_batch()
    outputs = frozenset({"log_probs"})
    forward = engine.forward(batch, outputs=outputs, micro=micro).ragged("log_probs").values
    first = synthetic.weights(engine)["model.embed_tokens.weight"]
    engine.train_step(batch, loss, micro=micro)
    engine.save(saved)
    engine.train_step(batch, loss, micro=micro)
    return {
        "gradients": gradients,
        "forward": forward,
        "saved": saved,
        "embedding": first,
        "weights": synthetic.weights(engine),
    }


@pytest.fixture(scope="module")
def results(folder, single, tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def pair(folder, single, results):
    run_ranks(JOB, folder, single["saved"], results)
    return torch.load(results / "record.pt", weights_only=False)


def test_gradients_and_metrics_equal_one_rank(single, pair):
    checked = 0
    for (precision, share, mode, cut), (gradient, metrics) in pair["gradients"].items():
        wanted, wanted_metrics = single["gradients"][precision, mode]
        gap = synthetic.relative_difference(gradient, wanted)
        assert gap <= TOLERANCE[precision], (precision, share, mode, cut, gap)
        assert metrics == pytest.approx(wanted_metrics, rel=TOLERANCE[precision]), (share, mode, cut)
        checked += 1
    assert checked == 5 * 4 + 2 + 5


def test_the_rank_with_fewer_tokens_cuts_them_as_often(pair):
    """The ranks have 60 and 24 tokens under a budget of 30.

    With a limit on samples, the second rank gets an empty micro-batch instead.
    """
    assert pair["cuts"] == {"tokens": [[2, 2, 1], [1, 2, 1]], "samples": [[2, 2, 1], [2, 2, 0]]}


def test_forward_keeps_the_order_of_rows(single, pair):
    assert torch.allclose(pair["forward"], single["forward"], atol=1e-12, rtol=0)


def test_resumed_steps_are_bit_identical(pair):
    record = pair["checkpoints"]
    assert record["version"] == 1
    assert all(torch.equal(record["resumed"][name], record["straight"][name]) for name in record["straight"])


def test_checkpoint_of_one_rank_goes_on_at_two(single, pair):
    assert synthetic.relative_difference(pair["checkpoints"]["from_one_rank"], single["weights"]) <= 1e-9


def test_checkpoint_of_two_ranks_goes_on_at_one(folder, single, pair, results):
    engine = synthetic.make_engine(folder)
    engine.load(results / "two_ranks")
    assert engine.version == 1
    engine.train_step(synthetic.make_batch(), synthetic.SyntheticLoss(), micro=synthetic.CUTS["tokens"])
    assert synthetic.relative_difference(synthetic.weights(engine), single["weights"]) <= 1e-9


def test_every_rank_reports_a_loss_that_is_bad_on_one(pair):
    assert pair["non_finite"] == ["NonFiniteError loss", "NonFiniteError loss"]


def test_rollout_sees_whole_weights_and_ranks_hold_halves(single, pair):
    assert torch.equal(pair["unsharded"], single["embedding"])
    whole = pair["info"]["parameters"] * 8
    assert pair["info"]["world_size"] == 2
    assert 0.45 * whole <= pair["info"]["parameters@cpu"] <= 0.6 * whole


@pytest.mark.parametrize(("precision", "gathered", "reduced"), [("fp64", 8, 8), ("mixed", 2, 4)])
def test_collectives_are_counted_to_the_byte(pair, precision, gathered, reduced):
    """Each of two ranks receives one other shard, or one other contribution to its own shard.

    Layers are gathered in the forward and again in the backward, the root once.
    """
    found = pair["collectives"][precision]
    everything = sum(found["numbers"].values())
    layers = everything - found["numbers"]["root"]
    counted, counts, loss = 8, 16, 8  # micro-batches; tokens and sequences; the loss itself
    assert found["forward"][1] == everything * gathered + counted
    in_step = counted + counts + loss + 16 * found["metrics"]
    assert found["step"][1] == (everything + layers) * gathered + everything * reduced + in_step
    assert found["weights"][1] == found["whole"] - found["own"]
    assert found["left"] == (0.0, 0)
    for phase in ("warmed_up", "forward", "step", "weights"):
        assert 0 < found[phase][0] < 60


def test_gradients_reduced_in_each_micro_batch_are_the_same(single, pair):
    """Three micro-batches gather all weights and reduce all gradients twice more than one reduction does."""
    once, each = pair["synchronized"]["once"], pair["synchronized"]["each"]
    wanted, metrics = single["gradients"]["fp64", "token-mean"]
    for gradient, found, _ in (once, each):
        assert synthetic.relative_difference(gradient, wanted) <= 1e-9
        assert found == pytest.approx(metrics, rel=1e-9)
    assert each[2] - once[2] == 2 * 2 * 8 * sum(pair["collectives"]["fp64"]["numbers"].values())


def test_weights_of_another_engine_arrive_whole_in_the_shards(pair):
    record = pair["loaded"]
    assert record["version"] == 1
    assert record["same_outputs"]
    assert set(record["loaded"]) == set(record["exported"])
    assert all(torch.equal(record["loaded"][name], value) for name, value in record["exported"].items())
