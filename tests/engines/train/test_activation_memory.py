"""Every way to keep activations gives the same gradients. `matrix` tries some ways on several ranks."""

import pytest
import torch

from tests.engines.train import synthetic
from tests.engines.train.on_ranks import on_ranks, seven_or_three
from tests.engines.train.synthetic import KEPT, OFFLOADS, batch_of, engine_keeping, train, weights

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6}
MICRO, LOSS = synthetic.CUTS["three"], synthetic.SyntheticLoss()


def gradients(engine, precision="fp64"):
    return synthetic.gradients(engine, batch_of(precision), LOSS, MICRO)


@pytest.fixture(scope="module")
def plain(folder):
    """Return gradients and metrics without recomputation or offload."""
    return {each: gradients(engine_keeping(folder, "none", precision=each), each) for each in TOLERANCE}


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("kept", KEPT)
def test_gradients(folder, plain, kept, offload, precision):
    wanted, metrics = plain[precision]
    engine = engine_keeping(folder, kept, offload, precision)
    for _ in range(2):
        found, also = gradients(engine, precision)
        assert synthetic.relative_difference(found, wanted) <= TOLERANCE[precision]
        assert {name: also[name] for name in metrics} == pytest.approx(metrics, rel=TOLERANCE[precision])


def metrics_of(folder):
    engine = engine_keeping(folder, "full", "copied")
    return synthetic.gradients(engine, seven_or_three(batch_of("fp64")), LOSS, MICRO)[1]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bytes_are_summed_over_micro_batches_and_ranks(folder, ranks):
    """With every layer recomputed, all but the last offload their input: one number per token and feature."""
    metrics = on_ranks(metrics_of, folder)[0] if ranks == 2 else metrics_of(folder)
    tokens = [max(length - 1, 1) for length in synthetic.LENGTHS]
    ghosts = 2 * (ranks - 1)  # seven rows make three micro-batches, the other rank's three rows make one
    layers, row = synthetic.SHAPE["num_hidden_layers"], 8 * synthetic.SHAPE["hidden_size"]
    assert metrics["activation_offload_bytes"] == (layers - 1) * (sum(tokens) + ghosts) * row
    largest = sorted(tokens if ranks == 1 else tokens[:7])[-3:]
    assert metrics["activation_resident_bytes"] == 2 * sum(largest) * row


def test_a_frozen_model_and_one_without_offload_report_nothing(folder):
    _, metrics = gradients(engine_keeping(folder, "full"))
    assert not [name for name in metrics if name.startswith("activation")]
    frozen, trained = engine_keeping(folder, "ops", "copied", frozen=True), engine_keeping(folder, "none")
    assert torch.equal(*(synthetic.output(engine, batch_of("fp64")).values for engine in (frozen, trained)))
    assert frozen.activation_offload is None


def test_steps_and_a_resume_go_on_bit_for_bit(folder, tmp_path):
    batch = batch_of("fp64")
    plain, other = engine_keeping(folder, "none"), engine_keeping(folder, "ops", "copied")
    train(plain, batch, steps=2)
    train(other, batch)
    other.save(tmp_path)
    resumed = engine_keeping(folder, "every", "copied")
    resumed.load(tmp_path)
    train(resumed, batch)
    assert synthetic.same(weights(resumed), weights(plain))


def test_a_rollout_sees_the_layers_as_they_are(folder):
    plain, other = engine_keeping(folder, "none"), engine_keeping(folder, "ops", "copied")
    assert torch.equal(*map(synthetic.borrowed_logits, (plain, other)))
    assert other.activation_offload._layers == []
