"""Estimators with one number per sequence, compared with their equations in float64, sequence by sequence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.advantages.dr_grpo import dr_grpo
from tandem.algorithms.advantages.gdpo import gdpo
from tandem.algorithms.advantages.gpg import gpg
from tandem.algorithms.advantages.grpo_passk import grpo_passk
from tandem.algorithms.advantages.maxrl import maxrl
from tandem.algorithms.advantages.opo import opo
from tandem.errors import ConfigError, RewardError

INPUTS = ("token_level_rewards", "response_mask", "offsets", "group")
LENGTHS = st.lists(st.integers(0, 200) | st.sampled_from([1, 4096]), min_size=1, max_size=12)
SEEDS = st.integers(0, 2**31)


def members_of(i: int, group: list[int]) -> list[int]:
    return [j for j in range(len(group)) if group[j] == group[i]]


def slow_dr_grpo(scores, lengths, group, **options):
    out = []
    for i, score in enumerate(scores):
        mine = members_of(i, group)
        out.append(score - np.mean([scores[j] for j in mine]) if len(mine) > 1 else score)
    return out


def slow_passk(scores, lengths, group, *, norm_adv_by_std_in_grpo):
    out = []
    for i, score in enumerate(scores):
        mine = members_of(i, group)
        others = [scores[j] for j in mine if j != i]
        scale = np.std([scores[j] for j in mine], ddof=1) + 1e-6 if len(mine) > 1 else 1 + 1e-6
        lead = (score - max(others) if score > max(others) else 0.0) if others else score
        out.append(lead / scale if norm_adv_by_std_in_grpo else lead)
    return out


def slow_opo(scores, lengths, group, **options):
    out = []
    for i, score in enumerate(scores):
        mine, tokens = members_of(i, group), sum(lengths[j] for j in members_of(i, group))
        weighted = sum(lengths[j] * scores[j] for j in mine)
        out.append(score - weighted / tokens if len(mine) > 1 and tokens else score)
    return out


def slow_gpg(scores, lengths, group, *, f_norm):
    plain = slow_dr_grpo(scores, lengths, group)
    silent = sum(all(plain[j] == 0 for j in members_of(i, group)) for i in range(len(scores)))
    return [len(scores) / max(len(scores) - silent, 1) * each / f_norm for each in plain]


def slow_maxrl(scores, lengths, group, **options):
    out = []
    for i, score in enumerate(scores):
        mine = members_of(i, group)
        rate = np.mean([scores[j] for j in mine])
        out.append((score - rate) / (rate + 1e-6) if len(mine) > 1 else score)
    return out


CASES = [
    (dr_grpo, slow_dr_grpo, {}),
    (grpo_passk, slow_passk, {"norm_adv_by_std_in_grpo": True}),
    (grpo_passk, slow_passk, {"norm_adv_by_std_in_grpo": False}),
    (opo, slow_opo, {}),
    (gpg, slow_gpg, {"f_norm": 1.0}),
    (gpg, slow_gpg, {"f_norm": 0.25}),
    (maxrl, slow_maxrl, {}),
]


def facts(columns: dict[str, Tensor], rows: list[slice]) -> tuple[list[float], list[int], list[int]]:
    rewards, mask = columns["token_level_rewards"].double(), columns["response_mask"]
    scores = [rewards[row].sum().item() for row in rows]
    return scores, [int(mask[row].sum()) for row in rows], columns["group"].tolist()


@pytest.mark.equation("advantages/{function.__name__}")
@pytest.mark.parametrize(("function", "slow", "options"), CASES)
@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=25)
def test_against_the_equation(function, slow, options, lengths, seed, ragged_columns, rows) -> None:
    columns = ragged_columns(lengths, seed)
    spans = rows(columns)
    if function is maxrl:
        columns["token_level_rewards"] = columns["token_level_rewards"].abs()
    got = function(*(columns[name] for name in INPUTS), **options)
    assert got.returns is got.advantages
    assert got.advantages.dtype == torch.float32
    want = slow(*facts(columns, spans), **options)
    for row, advantage in zip(spans, want, strict=True):
        per_token = torch.where(columns["response_mask"][row], advantage, 0.0).double()
        torch.testing.assert_close(got.advantages[row].double(), per_token, rtol=1e-5, atol=1e-5)


def outcome(function, rewards: list[float], group: list[int], **options) -> list[float]:
    """Return the columns of sequences with one response token each."""
    count = len(rewards)
    mask = torch.ones(count, dtype=torch.bool)
    got = function(torch.tensor(rewards), mask, torch.arange(count + 1), torch.tensor(group), **options)
    return got.advantages.tolist()


@pytest.mark.parametrize("function", [dr_grpo, grpo_passk, opo, gpg, maxrl])
def test_equal_rewards_give_exact_zeros(function) -> None:
    assert outcome(function, [0.1] * 7 + [0.3] * 5, [0] * 7 + [1] * 5) == [0.0] * 12


@pytest.mark.equation("advantages/{function.__name__}")
@pytest.mark.parametrize("function", [dr_grpo, opo, gpg, maxrl])
def test_a_sample_that_is_alone_keeps_its_reward(function) -> None:
    assert outcome(function, [0.75, 0.5], [0, 1]) == [0.75, 0.5]


@pytest.mark.equation("advantages/grpo_passk")
def test_pass_at_k_by_hand() -> None:
    plain = {"norm_adv_by_std_in_grpo": False}
    rewards, group = [1.0, 4.0, 0.0, 2.0, 2.0, 2.0, 3.0], [0, 0, 1, 0, 1, 1, 2]
    assert outcome(grpo_passk, rewards, group, **plain) == [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0]
    std = torch.tensor([1.0, 4.0, 2.0]).std().item()
    assert outcome(grpo_passk, rewards, group)[1] == pytest.approx(2 / std, rel=1e-5)


@pytest.mark.equation("advantages/gpg")
def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    """GPG doubles the advantages if half of the samples are in groups without a learning signal.

    Two of the four prompts are always or never solved. A failure that is alone in its group gives no signal
    either.
    """
    rewards = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert outcome(gpg, rewards, [0, 0, 1, 1, 2, 2, 3, 3]) == [0.0] * 4 + [1.0, -1.0, -1.0, 1.0]
    assert outcome(gpg, [1.0, 0.0, 0.0], [0, 0, 1]) == [0.75, -0.75, 0.0]


@pytest.mark.equation("advantages/opo")
def test_opo_by_hand() -> None:
    """A response of three tokens with reward 1 and one of one token with reward 0 have the baseline 3/4."""
    got = opo(
        torch.tensor([0.0, 0.0, 1.0, 0.0]),
        torch.ones(4, dtype=torch.bool),
        torch.tensor([0, 3, 4]),
        torch.tensor([0, 0]),
    )
    assert got.advantages.tolist() == [0.25, 0.25, 0.25, -0.75]


@pytest.mark.equation("advantages/maxrl")
def test_maxrl_by_hand() -> None:
    """If one of four samples is correct, the advantages are n - 1 and -1; if none is correct, they are 0."""
    got = outcome(maxrl, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1])
    assert got == pytest.approx([3.0, -1.0, -1.0, -1.0, 0.0, 0.0], rel=1e-5)


@pytest.mark.equation("advantages/maxrl")
@pytest.mark.parametrize(("samples", "rate"), [(2, 0.3), (5, 0.05), (8, 0.6)])
def test_maxrl_climbs_one_term_of_the_likelihood_less_than_there_are_samples(samples, rate) -> None:
    """MaxRL with n samples follows the gradient of the first n - 1 terms of the log-likelihood.

    A policy succeeds with probability p. The mean gradient with respect to p, over all outcomes of n samples,
    equals that of the first n - 1 terms of log p = -sum_k (1 - p)**k / k. For dr_grpo, it is the gradient of
    the first term, times (n-1)/n.
    """
    mean = {maxrl: 0.0, dr_grpo: 0.0}
    for right in range(samples + 1):
        rewards = np.array([1.0] * right + [0.0] * (samples - right))
        score = (rewards - rate) / (rate * (1 - rate))  # derivative of log pi with respect to p, per sample
        chance = math.comb(samples, right) * rate**right * (1 - rate) ** (samples - right)
        for function in mean:
            advantages = np.array(outcome(function, rewards.tolist(), [0] * samples))
            mean[function] += chance * (advantages * score).mean()
    assert mean[maxrl] == pytest.approx(sum((1 - rate) ** k for k in range(samples - 1)), rel=1e-4)
    assert mean[dr_grpo] == pytest.approx((samples - 1) / samples, rel=1e-5)


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(RewardError, match=r"token_level_rewards(?s:.)*-1 for sample 2"):
        outcome(maxrl, [1.0, 0.0, -1.0], [0, 0, 0])


@pytest.mark.equation("advantages/gdpo")
@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("weights", [(), (2.0, 0.5, 0.0)])
@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=25)
def test_gdpo_against_the_equation(by_std, weights, lengths, seed, ragged_columns, rows, whitened) -> None:
    columns = ragged_columns(lengths, seed)
    spans, group = rows(columns), columns["group"].tolist()
    components, mask = columns["reward_components"].double().numpy(), columns["response_mask"]
    summed = torch.zeros(len(mask), dtype=torch.float64)
    for i, row in enumerate(spans):
        for k, weight in enumerate(weights or (1.0, 1.0, 1.0)):
            members = components[members_of(i, group), k]
            mean, std = (members.mean(), members.std(ddof=1)) if len(members) > 1 else (0.0, 1.0)
            deviation = components[i, k] - mean
            summed[row] += weight * (deviation / (std + 1e-6) if by_std else deviation)
    got = gdpo(
        columns["reward_components"],
        *(columns[name] for name in INPUTS[1:]),
        norm_adv_by_std_in_grpo=by_std,
        gdpo_reward_weights=weights,
    )
    want = whitened(summed, mask)
    torch.testing.assert_close(got.advantages.double(), want, rtol=1e-4, atol=1e-3)
    assert got.returns is got.advantages


@pytest.mark.equation("advantages/gdpo")
def test_gdpo_tells_apart_what_a_sum_does_not() -> None:
    """GDPO's weights distinguish samples whose component sums are equal.

    One sample is correct and long, the other wrong and short. Both have the same sum, so GRPO would give 0.
    """
    components = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    inputs = components, torch.ones(2, dtype=torch.bool), torch.arange(3), torch.tensor([0, 0])
    assert gdpo(*inputs).advantages.tolist() == [0.0, 0.0]
    half = 0.5**0.5
    assert gdpo(*inputs, gdpo_reward_weights=(2.0, 1.0)).advantages.tolist() == pytest.approx([half, -half])
    with pytest.raises(ConfigError, match=r"gdpo_reward_weights(?s:.)*expected: 2 numbers"):
        gdpo(*inputs, gdpo_reward_weights=(1.0,))
