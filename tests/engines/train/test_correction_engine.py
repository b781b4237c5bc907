"""A rollout correction in the loss does the same as before the update, in any micro-batches and ranks."""

import itertools

import pytest
import torch

from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.engines.train.base import Counts
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto
from tandem.workers.correction import KEPT, Correction, correction_columns, without_rejected
from tandem.workers.losses import ActorLoss
from tests.engines.train import corrected, synthetic
from tests.engines.train.on_ranks import on_ranks, seven_or_three

ROUNDING = 1e-6  # scaling the loss changes the rounding, because the model's norms pass gradients on in fp32


@pytest.fixture(scope="module")
def engine(folder):
    return synthetic.make_engine(folder)


@pytest.fixture(scope="module")
def batch(engine):
    return corrected.make_batch(engine)


def before(batch, name):
    """Correct the whole batch before the update; return it with the new columns, and the metrics."""
    config = RolloutCorrectionConfig(**corrected.SETTINGS[name])
    metrics = Metrics()
    columns = correction_columns(Correction(config), batch, metrics)
    return batch.union(DataProto(columns)), metrics.to_floats()


@pytest.mark.parametrize("mode", synthetic.MODES)
@pytest.mark.parametrize("name", corrected.SETTINGS)
def test_in_the_loss_is_as_before_the_update(engine, batch, name, mode):
    columns, measures = before(batch, name)
    kept = columns.ragged(KEPT).values.sum()
    assert 0.5 < kept / columns.ragged("response_mask").values.sum() < 0.95
    loss = corrected.loss_of(name, mode, recomputed=True)
    assert loss.correction is None and loss.weighted
    wanted, told = synthetic.gradients(engine, without_rejected(columns), loss, synthetic.CUTS["all"])
    norm = told.pop("grad_norm")
    for cut in synthetic.CUTS:
        here = corrected.loss_of(name, mode)
        gradient, metrics = synthetic.gradients(engine, batch, here, synthetic.CUTS[cut])
        assert synthetic.relative_difference(gradient, wanted) < ROUNDING, cut
        assert metrics.pop("grad_norm") == pytest.approx(norm, rel=ROUNDING)
        assert metrics == pytest.approx(told | measures, rel=1e-9, abs=1e-9), cut


@pytest.mark.parametrize("mode", synthetic.MODES)
@pytest.mark.parametrize("name", corrected.BYPASSES)
def test_bypass_mode_does_not_depend_on_the_micro_batches(engine, batch, name, mode):
    loss = corrected.loss_of(name, mode)
    wanted, told = synthetic.gradients(engine, batch, loss, synthetic.CUTS["all"])
    for cut in ("one", "three", "tokens"):
        gradient, metrics = synthetic.gradients(engine, batch, loss, synthetic.CUTS[cut])
        assert synthetic.relative_difference(gradient, wanted) < 1e-9, cut
        assert metrics == pytest.approx(told, rel=1e-9, abs=1e-9), cut


def test_the_denominator_is_what_was_kept(engine, batch):
    """With an advantage, a ratio and a weight of one at each token, the loss is minus one."""
    plain = batch.select(["tokens", "response_mask", "ref_log_probs", "rollout_log_probs"], ())
    mask = batch.ragged("response_mask")
    plain.batch["advantages"] = mask.with_values(torch.ones(len(mask.values), dtype=torch.float64))
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.6_1.8")
    actor = corrected.actor_config("token-mean", use_kl_loss=False, entropy_coeff=0.0)
    loss = ActorLoss.from_config(actor, recomputed=False, correction=config)
    _, metrics = synthetic.gradients(engine, plain, loss, synthetic.CUTS["three"])
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] > 0.1
    assert metrics["loss"] == metrics["pg_loss"] == pytest.approx(-1.0, abs=1e-12)


def test_a_mini_batch_of_which_nothing_is_left_changes_nothing(engine, batch):
    weights, version = synthetic.weights(engine), engine.version
    config = RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=1e-12)
    loss = ActorLoss.from_config(corrected.actor_config("token-mean"), recomputed=False, correction=config)
    metrics = engine.train_step(batch, loss, micro=synthetic.CUTS["three"]).to_floats()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1 and "lr" not in metrics
    assert engine.version == version and synthetic.same(synthetic.weights(engine), weights)
    synthetic.gradients(engine, batch, corrected.loss_of("token", "token-mean"), synthetic.CUTS["all"])


def test_a_loss_without_rejection_is_left_as_it_is():
    loss = ActorLoss.from_config(corrected.actor_config("token-mean"), recomputed=True)
    assert loss.recount(Metrics(), Counts(tokens=3, sequences=2)) == 1.0


def on_each_rank(folder, batch):
    """Return gradients and metrics by loss and the first rank's rows; the second has three rows, or none."""
    engine, found = synthetic.make_engine(folder), {}
    for name, (share, cut) in itertools.product(corrected.ALL, ((7, "three"), (10, "all"))):
        mine, loss = seven_or_three(batch, share), corrected.loss_of(name, "seq-mean-token-mean")
        found[name, share] = synthetic.gradients(engine, mine, loss, synthetic.CUTS[cut])
    return found


@pytest.mark.slow
def test_two_ranks_are_as_one(batch, folder):
    alone = on_each_rank(folder, batch)
    for found in on_ranks(on_each_rank, folder, batch):
        for case, (wanted, told) in alone.items():
            assert synthetic.relative_difference(found[case][0], wanted) < 1e-9, case
            assert found[case][1] == pytest.approx(told, rel=1e-9, abs=1e-9), case


def test_a_token_is_kept_where_it_is_within_the_bounds_of_all_modes():
    config = RolloutCorrectionConfig(rollout_rs="token_k2,token_k1", rollout_rs_threshold="0.001,0.8_1.2")
    old, mask = torch.tensor([0.0, 0.1, 0.5, -0.5, 0.0]), torch.tensor([True, True, True, True, False])
    found = Correction(config)(old, torch.zeros(5), mask, torch.tensor([0, 5]), Metrics())
    assert found.kept.tolist() == [True, False, False, False, False]
