"""Every advantage estimator, compared with its equation in float64 and with numbers computed by hand."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.registry import ADVANTAGES, Advantages
from tandem.algorithms.registry import advantage_estimator as find
from tandem.errors import ConfigError, RewardError
from tests.algorithms.advantages import slow_advantages as slow
from tests.algorithms.batches import SEEDS, batches, offsets_of, ragged_columns, rows, whitened

UNIT = st.sampled_from([0.0, 0.95, 0.99, 1.0]) | st.floats(0, 1)
BARS = st.sampled_from([(1.0, 1.0), (2.0, 0.5), (0.3, 0.3)])
BY_STD = {"norm_adv_by_std_in_grpo": st.booleans()}
ZERO_TAIL = {"handle_zero_tail": st.booleans()}


class Case(NamedTuple):
    """How an estimator is compared: the rows' type, the tolerances of both results, and the options drawn."""

    dtype: torch.dtype
    advantages: tuple[float, float]
    returns: float = 0.0
    options: dict[str, st.SearchStrategy] = {}  # noqa: RUF012


def wide(advantages, returns=0.0, **options):
    return Case(torch.float64, (advantages, advantages), returns, options)


def narrow(rtol=1e-5, atol=1e-5, **options):
    return Case(torch.float32, (rtol, atol), options=options)


CASES = {
    "gae": wide(1e-8, 1e-10, gamma=UNIT, lam=UNIT),
    "vtrace": wide(1e-9, 1e-9, gamma=UNIT, lam=UNIT, bars=BARS),
    "reinforce_plus_plus": wide(1e-8, 1e-10, gamma=UNIT),
    "remax": wide(1e-10, 1e-10),
    # The random columns are no probabilities, so w may be negative, and sums near 0 lose digits.
    "optimal_token_baseline": wide(1e-5, 1e-10, **ZERO_TAIL),
    "tir_optimal_token_baseline": wide(1e-5, 1e-10, **ZERO_TAIL),
    "rloo": wide(1e-6),
    "reinforce_plus_plus_baseline": wide(1e-8),
    "dr_grpo": narrow(),
    "grpo": narrow(1e-6, **BY_STD),
    "grpo_passk": narrow(**BY_STD),
    "gdpo": narrow(1e-4, 1e-3, **BY_STD, gdpo_reward_weights=st.sampled_from([(), (2.0, 0.5, 0.0)])),
    "gpg": narrow(f_norm=st.sampled_from([1.0, 0.25])),
    "maxrl": narrow(),
    "opo": narrow(),
}


def test_every_estimator_has_a_reference():
    assert set(CASES) == set(ADVANTAGES.names)


@pytest.mark.equation("advantages/{name}")
@pytest.mark.parametrize("name", CASES)
@batches(60, longest=120, holes=st.sampled_from([0.0, 0.2, 0.9, 1.0]), data=st.data())
def test_against_the_equation(name, lengths, seed, holes, data):
    case, (weighted, rounded) = CASES[name], data.draw(st.tuples(st.booleans(), st.booleans()))
    options = {key: data.draw(values, label=key) for key, values in case.options.items()}
    if "bars" in options:
        options["rho_bar"], options["c_bar"] = options.pop("bars")
    columns = ragged_columns(lengths, seed, case.dtype, holes)
    if not weighted:
        columns["rollout_is_weights"] = torch.ones_like(columns["rollout_is_weights"])
    if rounded:  # so that scores of a group may be equal, or the group's mean
        columns["token_level_rewards"] = columns["token_level_rewards"].round()
    if name == "maxrl":
        columns["token_level_rewards"] = columns["token_level_rewards"].abs()
    got = find(name)(columns, **options)
    advantages, returns = getattr(slow, name)(columns, **options)
    assert got.advantages.dtype == case.dtype
    rtol, atol = case.advantages
    torch.testing.assert_close(got.advantages.double(), advantages, rtol=rtol, atol=atol)
    if returns is None:
        assert got.returns is got.advantages
    else:
        torch.testing.assert_close(got.returns, returns, rtol=case.returns, atol=case.returns)


@pytest.mark.equation("advantages/{name}")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("gae", {"gamma": g, "lam": lam}) for g, lam in ((1, 1), (1, 0.5), (0.99, 1), (1, 0.9), (1, 0))),
        ("vtrace", {}),
    ],
)
def test_float32_at_32768_steps(name, options):
    columns = ragged_columns([32768, 17, 4096], seed=3)
    columns["rollout_log_probs"] = columns["old_log_probs"] + 0.01 * columns["values"]
    assert columns["response_mask"].sum() > 20_000
    options = {key: float(value) for key, value in options.items()}
    found, wanted = find(name)(columns, **options), getattr(slow, name)(columns, **options)
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).abs().max() <= 2e-6 * want.abs().max()


def test_bounds_that_the_theory_does_not_allow():
    for bars in ({"c_bar": 1.5}, {"rho_bar": 0.5}, {"c_bar": -0.1}):
        with pytest.raises(ConfigError) as caught:
            find("vtrace")(ragged_columns([4], seed=0), **bars)
        assert caught.value.field == "c_bar"


# By hand


def estimated(name, lengths, rewards, mask=None, group=None, options=None, **columns):
    """Return advantages and returns of a batch; by default, all tokens are responses to one prompt."""
    given = {"token_level_rewards": rewards, **columns}
    tensors = {key: torch.tensor(values) for key, values in given.items()}
    tensors["response_mask"] = torch.tensor(mask or [1] * len(rewards)) > 0
    tensors["offsets"] = offsets_of(lengths)
    tensors["group"] = torch.tensor(group or [0] * len(lengths))
    return find(name)(tensors, **(options or {}))


def outcome(name, rewards, group, **options):
    """Return the advantages of sequences with one response token each."""
    return estimated(name, [1] * len(rewards), rewards, group=group, options=options).advantages.tolist()


HALF = {"old_log_probs": [math.log(0.5)] * 6, "sum_pi_squared": [0.5] * 6}
"""Policies with pi = 1/2 and sum pi^2 = 1/2 everywhere, so W_t is t/2."""

HAND = [
    # With an observation: A_4 = 1 - 0.5; A_2 = 0.5*0.5 - 0.25 + 0.5*A_4; A_1 = 0.5*0.25 - 0.5 + 0.5*A_2
    ("gae", dict(lengths=[5], rewards=[0.0, 0, 0, 5, 1], values=[9, 0.5, 0.25, 9, 0.5], mask=[0, 1, 1, 0, 1],
                 options={"gamma": 0.5, "lam": 1.0}),
     [0, -0.25, 0.25, 0, 0.5], [0, 0.25, 0.5, 0, 1]),
    # At two positions, returns are 1 and 0 and weights are equal, so b = 1/2. At the other two, b = 0.
    ("optimal_token_baseline", dict(lengths=[2, 4], rewards=[0.0, 1, 0, 0, 0, 0],
                                    rollout_is_weights=[1.0] * 6, **HALF),
     [0.5, 0.5, -0.5, -0.5, 0, 0], [1, 1, 0, 0, 0, 0]),
    # The first sample waits two tokens for a tool, so its second response token is at position 3, …
    ("optimal_token_baseline", dict(lengths=[4, 2], rewards=[0.0, 0, 0, 1, 0, 0], mask=[1, 0, 0, 1, 1, 1],
                                    rollout_is_weights=[1.0] * 6, **HALF),
     [0.5, 0, 0, 1, -0.5, 0], [1, 0, 0, 1, 0, 0]),
    # … or at position 1, if only response tokens count.
    ("tir_optimal_token_baseline", dict(lengths=[4, 2], rewards=[0.0, 0, 0, 1, 0, 0], mask=[1, 0, 0, 1, 1, 1],
                                        rollout_is_weights=[1.0] * 6, **HALF),
     [0.5, 0, 0, 0.5, -0.5, -0.5], [1, 0, 0, 1, 0, 0]),
]  # fmt: skip


@pytest.mark.equation("advantages/{name}")
@pytest.mark.parametrize(("name", "batch", "advantages", "returns"), HAND)
def test_by_hand(name, batch, advantages, returns):
    got = estimated(name, **batch)
    want = torch.tensor(advantages, dtype=torch.float64)
    if name == "gae":
        want = whitened(want, torch.tensor(batch["mask"]) > 0)
    assert got.advantages.tolist() == pytest.approx(want.tolist(), rel=1e-5)
    assert got.returns.tolist() == returns


@pytest.mark.parametrize(
    "name", ["dr_grpo", "gpg", "grpo", "grpo_passk", "maxrl", "opo", "reinforce_plus_plus_baseline", "rloo"]
)
def test_equal_rewards_give_exact_zeros(name):
    rewards = [0.1] * 12 if name == "reinforce_plus_plus_baseline" else [0.1] * 7 + [0.3] * 5
    assert outcome(name, rewards, [0] * 7 + [1] * 5) == [0.0] * 12
    assert estimated("reinforce_plus_plus", [1] * 6, [0.1] * 6).advantages.tolist() == [0.0] * 6


@pytest.mark.equation("advantages/{name}")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("dr_grpo", "opo", "gpg", "maxrl")),
        ("grpo", {"norm_adv_by_std_in_grpo": False}),
    ],
)
def test_a_sample_that_is_alone_keeps_its_reward(name, options):
    assert outcome(name, [0.75, 0.5], [0, 1], **options) == [0.75, 0.5]


@pytest.mark.equation("advantages/maxrl")
def test_maxrl_by_hand():
    """If one of four samples is correct, the advantages are n - 1 and -1; if none is correct, they are 0."""
    got = outcome("maxrl", [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1])
    assert got == pytest.approx([3.0, -1.0, -1.0, -1.0, 0.0, 0.0], rel=1e-5)
    with pytest.raises(RewardError) as caught:
        outcome("maxrl", [1.0, 0.0, -1.0], [0, 0, 0])
    assert "-1 for sample 2" in caught.value.got


@pytest.mark.equation("advantages/maxrl")
@pytest.mark.parametrize(("samples", "rate"), [(2, 0.3), (5, 0.05), (8, 0.6)])
def test_maxrl_climbs_one_term_of_the_likelihood_less_than_there_are_samples(samples, rate):
    """The mean gradient with respect to p is that of the first n - 1 terms of log p = -sum_k (1 - p)**k / k.

    For dr_grpo, it is the gradient of the first term, times (n-1)/n.
    """
    mean = {"maxrl": 0.0, "dr_grpo": 0.0}
    for right in range(samples + 1):
        rewards = np.array([1.0] * right + [0.0] * (samples - right))
        score = (rewards - rate) / (rate * (1 - rate))  # derivative of log pi with respect to p, per sample
        chance = math.comb(samples, right) * rate**right * (1 - rate) ** (samples - right)
        for name in mean:
            mean[name] += chance * (np.array(outcome(name, rewards.tolist(), [0] * samples)) * score).mean()
    assert mean["maxrl"] == pytest.approx(sum((1 - rate) ** k for k in range(samples - 1)), rel=1e-4)
    assert mean["dr_grpo"] == pytest.approx((samples - 1) / samples, rel=1e-5)


@pytest.mark.equation("advantages/gdpo")
def test_gdpo_tells_apart_what_a_sum_does_not():
    """One sample is correct and long, the other wrong and short; both have the same sum of components."""

    def weighted(*weights):
        given = {"reward_components": [[1.0, 0.0], [0.0, 1.0]], "options": {"gdpo_reward_weights": weights}}
        return estimated("gdpo", [1, 1], [0.0, 0.0], **given).advantages.tolist()

    assert weighted() == [0.0, 0.0]
    assert weighted(2.0, 1.0) == pytest.approx([0.5**0.5, -(0.5**0.5)])
    with pytest.raises(ConfigError) as caught:
        weighted(1.0)
    assert caught.value.field == "gdpo_reward_weights"


LENGTHS = st.lists(st.integers(0, 60) | st.sampled_from([1, 400]), min_size=2, max_size=8)


def usable(lengths, seed, dtype=torch.float64, holes=0.2):
    """Return columns that every estimator accepts: rewards are success rates, and probabilities are valid."""
    columns = ragged_columns(lengths, seed, dtype, holes)
    squares = columns["old_log_probs"].exp() ** 2 + 0.1
    inside = {"sum_pi_squared": squares, "old_log_probs": columns["old_log_probs"]}
    inside = {name: torch.where(columns["response_mask"], each, torch.nan) for name, each in inside.items()}
    return columns | inside | {"token_level_rewards": columns["token_level_rewards"].abs().clamp(max=1)}


@pytest.mark.parametrize("name", ADVANTAGES.names)
@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=8)
def test_tokens_outside_the_mask_do_not_matter(name, lengths, seed):
    """Each sequence gets two tokens before it and three after it, with NaN in all columns but the rewards."""
    columns = usable(lengths, seed, holes=0.0)
    spans, wide = rows(columns), {}
    for key, column in columns.items():
        if key in ("group", "reward_baselines", "reward_components"):
            wide[key] = column
        elif key == "offsets":
            wide[key] = column + 5 * torch.arange(len(column))
        else:
            empty = 0 if key.startswith("token_level") or key == "response_mask" else torch.nan
            front, back = (torch.full((n,), empty, dtype=torch.float64).to(column.dtype) for n in (2, 3))
            wide[key] = torch.cat([part for row in spans for part in (front, column[row], back)])
    places = [slice(row.start + 5 * i + 2, row.stop + 5 * i + 2) for i, row in enumerate(spans)]
    found = find(name)(wide)
    for plain, part in zip(find(name)(columns), found, strict=True):
        inside = torch.cat([part[place] for place in places])
        torch.testing.assert_close(plain, inside, rtol=1e-7, atol=1e-7)
        assert not part[~wide["response_mask"]].any()


@pytest.mark.parametrize("name", ADVANTAGES.names)
@pytest.mark.parametrize("lengths", [[1], [3, 1], [0, 4], [5, 5, 5, 5], [4096, 1, 4095]])
@pytest.mark.parametrize("case", ["no response", "all alone", "equal rewards", "no rewards"])
def test_edges_give_finite_numbers_that_leave_the_inputs_alone(name, lengths, case):
    columns = usable(lengths, 1, torch.float32)
    if case == "no response":
        columns["response_mask"] = torch.zeros_like(columns["response_mask"])
    elif case == "all alone":
        columns["group"] = torch.arange(len(lengths))
    else:
        columns["group"] = torch.zeros_like(columns["group"])
        rewards = torch.where(columns["response_mask"], 0.3 if case == "equal rewards" else 0.0, 0.0)
        columns["token_level_rewards"] = rewards
    before = {key: column.clone() for key, column in columns.items()}
    got = find(name)(columns)
    assert isinstance(got, Advantages)
    for part in got:
        assert part.dtype == torch.float32 and part.isfinite().all()
        assert not part[~columns["response_mask"]].any()
    for key, column in columns.items():
        torch.testing.assert_close(column, before[key], rtol=0, atol=0, equal_nan=True)
