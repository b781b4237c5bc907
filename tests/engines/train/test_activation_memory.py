"""Every way to keep activations gives the same gradients, on one rank and with layers sharded on two."""

import activation_job
import pytest
import synthetic
import torch
from activation_job import MODES, OFFLOADS, batch_of, engine_with

from tests.support.ranks import run_ranks

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6}
TWO_RANKS = {"fp64": 1e-9, "fp32": 1e-5}  # sums over ranks are added in another order
MICRO = synthetic.CUTS["three"]


@pytest.fixture(scope="module")
def plain(folder):
    """Return gradients and metrics on one rank, without recomputation or offload."""
    found = {}
    for precision in TOLERANCE:
        engine = engine_with(folder, "none", "none", precision)
        found[precision] = synthetic.gradients(engine, batch_of(precision), synthetic.SyntheticLoss(), MICRO)
    return found


@pytest.fixture(scope="module", params=["fp64", pytest.param("fp32", marks=pytest.mark.slow)])
def pair(folder, tmp_path_factory, request):
    """Return a precision, and the results of two ranks in it."""
    results = tmp_path_factory.mktemp("results") / "record.pt"
    run_ranks(activation_job.__file__, folder, results, request.param)
    return request.param, torch.load(results, weights_only=False)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_on_one_rank(folder, plain, mode, offload, precision):
    wanted, metrics = plain[precision]
    engine = engine_with(folder, mode, offload, precision)
    loss = synthetic.SyntheticLoss()
    for _ in range(2):
        found, also = synthetic.gradients(engine, batch_of(precision), loss, MICRO)
        assert synthetic.relative_difference(found, wanted) <= TOLERANCE[precision]
        assert {name: also[name] for name in metrics} == pytest.approx(metrics, rel=TOLERANCE[precision])


@pytest.mark.slow
def test_gradients_on_two_ranks(plain, pair):
    """The gradients equal those of one rank, and all ways move the same number of bytes.

    FSDP gathers a layer's weights once for its forward and once for its backward, with or without
    recomputation.
    """
    precision, record = pair
    wanted, _ = plain[precision]
    alone, _, traffic = record[precision, "none", "none"]
    assert synthetic.relative_difference(alone, wanted) <= TWO_RANKS[precision]
    for mode in MODES:
        for offload in OFFLOADS:
            found, metrics, received = record[precision, mode, offload]
            assert synthetic.relative_difference(found, alone) <= TOLERANCE[precision], (mode, offload)
            more = 2 * 16 if offload != "none" else 0  # two more metrics to reduce
            assert received == traffic + more, (mode, offload)
            assert not more or metrics["activation_offload_bytes"] > 0


@pytest.mark.slow
def test_bytes_are_summed_over_micro_batches_and_ranks(folder, pair):
    """With every layer recomputed, all but the last offload their input: one number per token and feature."""
    precision, record = pair
    _, here = synthetic.gradients(
        engine_with(folder, "full", "copied", precision),
        batch_of(precision),
        synthetic.SyntheticLoss(),
        MICRO,
    )
    _, there, _ = record[precision, "full", "copied"]
    tokens = [max(length - 1, 1) for length in synthetic.LENGTHS]
    layers, size = synthetic.SHAPE["num_hidden_layers"], 8 if precision == "fp64" else 4
    row = size * synthetic.SHAPE["hidden_size"]
    ghosts = 2  # of one token each: seven rows make three micro-batches, the other rank's three rows make one
    assert here["activation_offload_bytes"] == (layers - 1) * sum(tokens) * row
    assert there["activation_offload_bytes"] == (layers - 1) * (sum(tokens) + ghosts) * row
    for metrics, rows in ((here, tokens), (there, tokens[:7])):
        assert metrics["activation_resident_bytes"] == 2 * sum(sorted(rows)[-3:]) * row


def test_a_frozen_model_and_one_without_offload_report_nothing(folder):
    batch = batch_of("fp64")
    _, metrics = synthetic.gradients(
        engine_with(folder, "full", "none"), batch, synthetic.SyntheticLoss(), MICRO
    )
    assert not [name for name in metrics if name.startswith("activation")]
    frozen = engine_with(folder, "ops", "copied", frozen=True)
    trained = engine_with(folder, "none", "none")
    outputs = frozenset({"log_probs"})
    found, wanted = (
        engine.forward(batch, outputs=outputs, micro=MICRO).ragged("log_probs").values
        for engine in (frozen, trained)
    )
    assert torch.equal(found, wanted) and frozen.activation_offload is None


def test_steps_and_a_resume_go_on_bit_for_bit(folder, tmp_path):
    """Offload and recomputation change no update, and a checkpoint does not depend on them."""
    loss, batch = synthetic.SyntheticLoss(), batch_of("fp64")
    plain, other = engine_with(folder, "none", "none"), engine_with(folder, "ops", "copied")
    for engine in (plain, other):
        engine.train_step(batch, loss, micro=MICRO)
    other.save(tmp_path)
    resumed = engine_with(folder, "every", "copied")
    resumed.load(tmp_path)
    for engine in (plain, resumed):
        engine.train_step(batch, loss, micro=MICRO)
    wanted = synthetic.weights(plain)
    assert all(torch.equal(value, wanted[name]) for name, value in synthetic.weights(resumed).items())


def test_a_rollout_sees_the_layers_as_they_are(folder):
    """A rollout that borrows the module gets the same logits, without recomputation or offload."""
    plain, other = engine_with(folder, "none", "none"), engine_with(folder, "ops", "copied")
    ids, outputs = torch.arange(9)[None], []
    for engine in (plain, other):
        with engine.unsharded() as module, torch.no_grad():
            module.set_attn_implementation("sdpa")
            outputs.append(module(ids, use_cache=False).logits)
            module.set_attn_implementation("tandem_packed")
    assert torch.equal(*outputs)
    assert other.activation_offload._layers == []
