"""Importance weights, rejection modes and measures of distance, compared with their equations in float64."""

import math

import pytest
import torch

from tandem.algorithms.corrections.distance import distance_observations
from tandem.algorithms.corrections.registry import IMPORTANCE_WEIGHTS, REJECTIONS
from tandem.algorithms.corrections.rejection import rejection_observations, within
from tandem.algorithms.corrections.weights import bounded_weights, normalised_weights, weight_observations
from tests.algorithms.batches import batches, chosen, ragged_columns, responses, rows

WEIGHTS = {"token": False, "sequence": True, "geometric": True}
"""Each kind of weight, and whether a response has one weight."""

MODES = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)


def compared(lengths, seed):
    """Return the columns of a correction; some rollout log-probs differ by more than 20 nats."""
    columns = ragged_columns(lengths, seed, torch.float64)
    far = torch.where(columns["advantages"] > 1.2, 30.0, 1.0)
    return columns | {"rollout_log_probs": columns["log_probs"] * far}


def per_token(columns, of_response):
    """Return numbers (N) from a function of a response's log-ratios, and 0 outside of responses."""
    gap = (columns["old_log_probs"] - columns["rollout_log_probs"]).tolist()
    found = [0.0] * len(gap)
    for tokens in responses(columns):
        for t, value in zip(tokens, of_response([gap[t] for t in tokens]), strict=True):
            found[t] = value
    return found


def clamped(value):
    return min(max(value, -20.0), 20.0)


def weights_of(name, ratios):
    total, count = sum(ratios), len(ratios)
    exponents = {"token": ratios, "sequence": [total] * count, "geometric": [total / max(count, 1)] * count}
    return [math.exp(clamped(exponent)) for exponent in exponents[name]]


def statistics_of(mode, ratios):
    level, k = mode.rsplit("_", 1)
    kind = {"k1": lambda r: -r, "k2": lambda r: r * r / 2, "k3": lambda r: math.exp(r) - 1 - r}[k]
    values = [kind(clamped(ratio)) for ratio in ratios]
    whole = {"seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}
    return values if level == "token" or not values else [whole[level](values)] * len(values)


def found_by(spec, columns):
    return torch.where(columns["response_mask"], spec(columns), 0)


@pytest.mark.equation("corrections/{name}")
@pytest.mark.parametrize("name", WEIGHTS)
@batches(40, longest=12, most=6)
def test_weights_are_their_equations(name, lengths, seed):
    columns = compared(lengths, seed)
    wanted = per_token(columns, lambda ratios: weights_of(name, ratios))
    assert found_by(IMPORTANCE_WEIGHTS.find(name), columns).tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.equation("rejections/{mode}")
@pytest.mark.parametrize("mode", MODES)
@batches(40, longest=12, most=6)
def test_the_statistic_is_its_equation_in_any_order_of_samples(mode, lengths, seed):
    columns = compared(lengths, seed)
    found = found_by(REJECTIONS.find(mode), columns)
    wanted = per_token(columns, lambda ratios: statistics_of(mode, ratios))
    assert found.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    order = list(reversed(range(len(lengths))))
    expected = torch.cat([found[rows(columns)[i]] for i in order])
    assert torch.equal(found_by(REJECTIONS.find(mode), chosen(columns, order)), expected)


def test_what_is_registered():
    assert {name: IMPORTANCE_WEIGHTS.find(name).by_sequence for name in IMPORTANCE_WEIGHTS.names} == WEIGHTS
    by_sequence = {mode: REJECTIONS.find(mode).by_sequence for mode in REJECTIONS.names}
    assert by_sequence == {mode: mode.startswith("seq") for mode in MODES}
    documented = REJECTIONS.find("seq_mean_k3").fn.__doc__ or ""
    assert "k_t = exp(r_t) - 1 - r_t" in documented and "statistic = sum_t k_t / T" in documented


def test_bounds_truncate_or_mask_weights_and_hold_their_ends_and_no_nan():
    weights = torch.tensor([0.1, 0.5, 1.0, 2.0, 5.0], dtype=torch.float64)
    assert bounded_weights(weights, lower=None, upper=2.0).tolist() == [0.1, 0.5, 1.0, 2.0, 2.0]
    assert bounded_weights(weights, lower=0.5, upper=2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]
    values = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, torch.nan])
    assert within(values, lower=0.0, upper=1.0).tolist() == [False, True, True, True, False, False]
    assert within(values, lower=None, upper=1.0).tolist() == [True, True, True, True, False, False]


@pytest.mark.parametrize("by_sequence", [False, True])
@batches(40, longest=12, most=6)
def test_normalised_weights_have_mean_one(by_sequence, lengths, seed):
    columns = compared(lengths, seed)
    weights = IMPORTANCE_WEIGHTS.find("token")(columns)
    parts = [[float(weights[t]) for t in tokens] for tokens in responses(columns) if tokens]
    means = [sum(row) / len(row) for row in parts] if by_sequence else [w for row in parts for w in row]
    mean = sum(means) / max(len(means), 1)
    mean = mean if mean > 1e-8 else 1.0
    mask, offsets = columns["response_mask"], columns["offsets"]
    found, factor = normalised_weights(weights, mask, offsets, by_sequence=by_sequence)
    assert float(factor) == pytest.approx(mean, rel=1e-12)
    assert torch.allclose(found, weights / mean, rtol=1e-12)


def counted(observations, prefix=""):
    return {n.removeprefix(prefix): item.values[item.counted].tolist() for n, item in observations.items()}


def test_what_is_reported_of_weights():
    """There are two responses of two tokens, the second of which is cut, and one without a token."""
    mask, offsets = torch.tensor([False, True, True, True, True, False]), torch.tensor([0, 3, 5, 6])
    raw = torch.tensor([9.0, 0.5, 1.5, 4.0, 0.4, 9.0], dtype=torch.float64)
    bounds = {"lower": None, "upper": 2.0, "by_sequence": False}
    values = counted(weight_observations(raw, raw.clamp(max=2.0), mask, offsets, **bounds), "rollout_is_")
    assert values["mean"] == [0.5, 1.5, 2.0, 0.4]
    assert values["ratio_fraction_high"] == [False, False, True, False]
    assert values["ratio_fraction_low"] == [False, False, False, True]  # below 1 / 2
    assert values["seq_mean"] == [1.0, 1.2]
    assert values["seq_max_deviation"] == pytest.approx([0.0, 0.2])
    assert values["seq_fraction_high"] == [False, True]  # raw mean 2.2
    assert "oob_ratio" not in values
    shared = weight_observations(raw, raw, mask, offsets, lower=0.6, upper=2.0, by_sequence=True)
    assert shared["rollout_is_ratio_fraction_high"].counted.tolist() == [True, True, False]
    assert counted(shared)["rollout_is_oob_ratio"] == [True, False, True, True]


def test_what_is_reported_of_a_rejection_mode():
    mask, offsets = torch.tensor([True, True, True, False, True]), torch.tensor([0, 2, 5])
    statistic = torch.tensor([-1.0, 0.5, 3.0, 99.0, 0.0], dtype=torch.float64)
    bounds = {"lower": -0.5, "upper": 1.0, "by_sequence": False}
    values = counted(rejection_observations("m", statistic, mask, offsets, **bounds), "rollout_rs_m_")
    high, low = [False, False, True, False], [True, False, False, False]
    wanted = {
        **{"mean": [-1.0, 0.5, 3.0, 0.0], "std": [-0.5, 0.5, 1.0, 0.0], "fraction_high": high},
        **{"fraction_low": low, "masked_fraction": [True, False, True, False], "seq_mean": [-0.25, 1.5]},
        "seq_masked_fraction": [True, True],
    }
    assert {name: values[name] for name in wanted} == wanted
    whole = rejection_observations("m", statistic, mask, offsets, lower=None, upper=1.0, by_sequence=True)
    assert counted(whole)["rollout_rs_m_fraction_high"] == [False, True]
    assert "rollout_rs_m_fraction_low" not in whole


@batches(40, longest=9, most=6)
def test_each_measure_of_distance_is_its_definition(lengths, seed):
    columns = ragged_columns(lengths, seed)
    old, rollout = columns["old_log_probs"].double(), columns["log_probs"].double()
    found = counted(distance_observations(old, rollout, columns["response_mask"], columns["offsets"]))
    parts = [[(float(old[t]), float(rollout[t])) for t in tokens] for tokens in responses(columns) if tokens]
    tokens = [p - q for row in parts for p, q in row]
    training = [-sum(p for p, _ in row) / len(row) for row in parts]
    sampled = [-sum(q for _, q in row) / len(row) for row in parts]
    products = [sum(p - q for p, q in row) for row in parts]
    apart = [p - q for p, q in zip(training, sampled, strict=True)]
    expected = {
        **{"kl": [-r for r in tokens], "k3_kl": [math.exp(r) - 1 - r for r in tokens]},
        **{"training_ppl": [math.exp(x) for x in training], "training_log_ppl": training},
        **{"rollout_ppl": [math.exp(x) for x in sampled], "rollout_log_ppl": sampled},
        **{"log_ppl_abs_diff": [abs(x) for x in apart], "ppl_ratio": [math.exp(x) for x in apart]},
        "chi2_token": [math.exp(2 * r) - 1 for r in tokens],
        "chi2_seq": [math.exp(2 * clamped(r)) - 1 for r in products],
    } | dict.fromkeys(("log_ppl_diff", "log_ppl_diff_max", "log_ppl_diff_min"), apart)
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-9, abs=1e-12), name
