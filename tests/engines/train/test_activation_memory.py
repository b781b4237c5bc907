"""Every way to keep activations gives the same gradients, on one rank and with layers sharded on two."""

import itertools

import pytest
import torch

from tests.engines.train import synthetic
from tests.engines.train.on_ranks import on_ranks, seven_or_three
from tests.engines.train.synthetic import (
    KEPT,
    OFFLOADS,
    batch_of,
    engine_keeping,
    output,
    same,
    train,
    weights,
)
from tests.support.marks import slow_but

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6}
TWO_RANKS = {"fp64": 1e-9, "fp32": 1e-5}  # sums over ranks are added in another order
MICRO, LOSS = synthetic.CUTS["three"], synthetic.SyntheticLoss()


def gradients(folder, kept, offload, precision):
    """Return gradients and metrics, and the bytes exchanged."""
    engine = engine_keeping(folder, kept, offload, precision)
    engine.take_collectives()
    found = synthetic.gradients(engine, seven_or_three(batch_of(precision)), LOSS, MICRO)
    return *found, engine.take_collectives()[1]


def in_each_way(folder, precision):
    return {way: gradients(folder, *way, precision) for way in itertools.product(KEPT, OFFLOADS)}


@pytest.fixture(scope="module")
def plain(folder):
    """Return gradients and metrics on one rank, without recomputation or offload."""
    return {precision: gradients(folder, "none", "none", precision)[:2] for precision in TOLERANCE}


@pytest.fixture(scope="module", params=TOLERANCE)
def pair(folder, request):
    """Return a precision, and the results of two ranks in it."""
    return request.param, on_ranks(in_each_way, folder, request.param)[0]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("kept", KEPT)
def test_gradients_on_one_rank(folder, plain, kept, offload, precision):
    wanted, metrics = plain[precision]
    engine = engine_keeping(folder, kept, offload, precision)
    for _ in range(2):
        found, also = synthetic.gradients(engine, batch_of(precision), LOSS, MICRO)
        assert synthetic.relative_difference(found, wanted) <= TOLERANCE[precision]
        assert {name: also[name] for name in metrics} == pytest.approx(metrics, rel=TOLERANCE[precision])


@pytest.mark.parametrize("family", slow_but(("gpt_oss",), ("gpt_oss", "gemma2", "gemma3")))
def test_gradients_with_windows_sinks_and_caps(models, family):
    """Layers that run again attend to the same tokens."""
    wanted, _, _ = gradients(models / family, "none", "none", "fp64")
    for kept in KEPT:
        found, _, _ = gradients(models / family, kept, "copied", "fp64")
        assert synthetic.relative_difference(found, wanted) <= TOLERANCE["fp64"], kept


@pytest.mark.slow
def test_gradients_on_two_ranks(plain, pair):
    """The gradients equal those of one rank, and all ways move the same number of bytes.

    FSDP gathers a layer's weights once for its forward and once for its backward, with or without
    recomputation.
    """
    precision, record = pair
    wanted, _ = plain[precision]
    alone, _, traffic = record["none", "none"]
    assert synthetic.relative_difference(alone, wanted) <= TWO_RANKS[precision]
    for (kept, offload), (found, metrics, received) in record.items():
        assert synthetic.relative_difference(found, alone) <= TOLERANCE[precision], (kept, offload)
        more = 2 * 16 if offload != "none" else 0  # two more metrics to reduce
        assert received == traffic + more, (kept, offload)
        assert not more or metrics["activation_offload_bytes"] > 0


@pytest.mark.slow
def test_bytes_are_summed_over_micro_batches_and_ranks(folder, pair):
    """With every layer recomputed, all but the last offload their input: one number per token and feature."""
    precision, record = pair
    _, here, _ = gradients(folder, "full", "copied", precision)
    _, there, _ = record["full", "copied"]
    tokens = [max(length - 1, 1) for length in synthetic.LENGTHS]
    layers, size = synthetic.SHAPE["num_hidden_layers"], 8 if precision == "fp64" else 4
    row = size * synthetic.SHAPE["hidden_size"]
    ghosts = 2  # of one token each: seven rows make three micro-batches, the other rank's three rows make one
    assert here["activation_offload_bytes"] == (layers - 1) * sum(tokens) * row
    assert there["activation_offload_bytes"] == (layers - 1) * (sum(tokens) + ghosts) * row
    for metrics, rows in ((here, tokens), (there, tokens[:7])):
        assert metrics["activation_resident_bytes"] == 2 * sum(sorted(rows)[-3:]) * row


def test_a_frozen_model_and_one_without_offload_report_nothing(folder):
    _, metrics, _ = gradients(folder, "full", "none", "fp64")
    assert not [name for name in metrics if name.startswith("activation")]
    frozen = engine_keeping(folder, "ops", "copied", frozen=True)
    trained = engine_keeping(folder, "none")
    assert torch.equal(*(output(engine, batch_of("fp64")).values for engine in (frozen, trained)))
    assert frozen.activation_offload is None


def test_steps_and_a_resume_go_on_bit_for_bit(folder, tmp_path):
    """Offload and recomputation change no update, and a checkpoint does not depend on them."""
    batch = batch_of("fp64")
    plain, other = engine_keeping(folder, "none"), engine_keeping(folder, "ops", "copied")
    train(plain, batch, steps=2)
    train(other, batch)
    other.save(tmp_path)
    resumed = engine_keeping(folder, "every", "copied")
    resumed.load(tmp_path)
    train(resumed, batch)
    assert same(weights(resumed), weights(plain))


def test_a_rollout_sees_the_layers_as_they_are(folder):
    """A rollout that borrows the module gets the same logits, without recomputation or offload."""
    plain, other = engine_keeping(folder, "none"), engine_keeping(folder, "ops", "copied")
    assert torch.equal(*map(synthetic.borrowed_logits, (plain, other)))
    assert other.activation_offload._layers == []
