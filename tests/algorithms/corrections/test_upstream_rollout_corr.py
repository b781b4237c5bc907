"""Expectations of verl 0.9.1's test_rollout_corr.py that hold; docs/verl-tests.md lists the others."""

import pydantic
import pytest
import torch

from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.observability.metrics import Metrics
from tandem.workers.correction import Correction

OFF_POLICY = (
    "training_ppl", "training_log_ppl", "kl", "k3_kl", "rollout_ppl", "rollout_log_ppl", "log_ppl_diff",
    "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio", "chi2_token", "chi2_seq",
)  # fmt: skip
OF_WEIGHTS = ("mean", "max", "min", "std", "eff_sample_size", "ratio_fraction_high", "ratio_fraction_low")
MODES = {
    "token_k1": "0.5_1.5", "token_k2": "2.0", "token_k3": "2.0", "seq_sum_k1": "0.6_1.4", "seq_sum_k2": "2.5",
    "seq_sum_k3": "2.5", "seq_mean_k1": "0.5_1.5", "seq_mean_k2": "2.0", "seq_mean_k3": "2.0",
    "seq_max_k2": "2.0", "seq_max_k3": "2.0", "token_k1,seq_max_k3": "0.4_1.8,3.0",
}  # fmt: skip


def near_one(samples, tokens, deviation):
    return (deviation * torch.randn(samples, tokens)).exp()


def corrected(ratios, weights=None, bound=None, rejected=None, within=None):
    """Return weights and mask for ratios (samples, tokens) of training's and the rollout's probabilities."""
    samples, tokens = ratios.shape
    old, metrics = torch.randn(samples * tokens), Metrics()
    keys = {"rollout_is": weights, "rollout_is_threshold": bound}
    keys |= {"rollout_rs": rejected, "rollout_rs_threshold": within}
    config = RolloutCorrectionConfig(**{name: value for name, value in keys.items() if value is not None})
    mask, offsets = torch.ones(samples * tokens, dtype=torch.bool), torch.arange(samples + 1) * tokens
    found, kept = Correction(config)(old, old - ratios.log().flatten(), mask, offsets, metrics)
    told = {name.removeprefix("rollout_corr/"): value for name, value in metrics.to_floats().items()}
    return None if found is None else found.view_as(ratios), kept.view_as(ratios), told


def test_weights_of_tokens_of_sequences_and_none():
    ratios = near_one(4, 10, 0.5)
    weights, _, found = corrected(ratios, "token", "2.0")
    torch.testing.assert_close(weights, ratios.clamp(max=2.0), rtol=1e-5, atol=1e-5)
    assert {*OFF_POLICY, *(f"rollout_is_{name}" for name in OF_WEIGHTS)} <= set(found)
    weights, _, found = corrected(ratios, "sequence", "5.0")
    products = ratios.prod(1, keepdim=True).clamp(max=5.0)
    torch.testing.assert_close(weights, products.expand(4, 10), rtol=1e-4, atol=1e-5)
    assert found["rollout_is_mean"] == pytest.approx(products.mean().item(), rel=1e-4)
    _, kept, found = corrected(ratios, rejected="seq_mean_k1", within="0.5_1.5")
    assert found["rollout_rs_masked_fraction"] == pytest.approx((~kept).float().mean().item())
    weights, kept, found = corrected(ratios)
    assert weights is None and kept.all() and set(OFF_POLICY) <= set(found)


CASES = [  # ratios, options, weights, kept tokens, and what is reported
    ([[0.37], [1.65]], ("token", "2.0", "token_k1", "0.5_2.0"), [[0.37], [1.65]], [[False], [True]],
     {"rollout_rs_masked_fraction": 0.5}),
    ([[0.4, 0.8, 6.0]], ("token", "0.5_5.0"), [[0.0, 0.8, 0.0]], [[True] * 3],
     {"rollout_is_oob_ratio": 2 / 3, "rollout_is_std": 0.3771236, "rollout_is_eff_sample_size": 1 / 3}),
    ([[1.0, 6.0], [0.9, 1.1]], ("token", "2.0"), [[1.0, 2.0], [0.9, 1.1]], [[True] * 2] * 2,
     {"rollout_is_seq_fraction_high": 0.5}),  # of weights before they are cut
]  # fmt: skip


@pytest.mark.parametrize(("ratios", "options", "weights", "kept", "told"), CASES)
def test_by_hand(ratios, options, weights, kept, told):
    found, mask, metrics = corrected(torch.tensor(ratios), *options)
    torch.testing.assert_close(found, torch.tensor(weights), rtol=1e-5, atol=1e-5)
    assert mask.tolist() == kept
    assert {name: metrics[name] for name in told} == pytest.approx(told, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_rejection_reports_itself(mode):
    _, kept, found = corrected(near_one(3, 7, 0.15), rejected=mode, within=MODES[mode])
    assert {f"rollout_rs_{each}_mean" for each in mode.split(",")} <= set(found)
    assert kept.shape == (3, 7)


def test_a_truth_value_is_no_bound():
    with pytest.raises((pydantic.ValidationError, ValueError)):
        _ = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=True).weight_bounds
