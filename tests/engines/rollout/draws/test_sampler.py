from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tandem.engines.rollout.draws import sampler
from tandem.engines.rollout.draws.keyed import uniforms
from tandem.engines.rollout.draws.sampler import RowParams, sample
from tandem.protocol import SamplingParams
from tests.contract.reference import distribution

CPU, META = torch.device("cpu"), torch.device("meta")
ALMOST_ONE = 1 - 2.0**-53


def row_params(params, vocabulary, device=CPU):
    columns = zip(*((p.temperature, p.top_k, p.top_p, p.min_p) for p in params), strict=True)
    return RowParams.of(*(np.array(column) for column in columns), vocabulary, device)


def draw(logits, params, numbers):
    rows = torch.as_tensor(logits).expand(len(numbers), -1)
    numbers = torch.as_tensor(numbers, dtype=torch.float64)
    return sample(rows, numbers, row_params([params] * len(numbers), rows.shape[1]))


def check_draws(logits, params, numbers, tolerance=1e-9):
    """Check each token, and both of its log-probs, against the reference. Return the tokens."""
    logits = torch.as_tensor(logits)
    _, expected, whole = distribution(logits.double().numpy(), params)
    drawn = draw(logits, params, numbers)
    tokens = drawn.tokens_R.numpy()
    if params.greedy:
        assert set(tokens) == {int(np.argmax(logits.numpy()))}
    else:
        assert (expected[tokens] > 0).all()
        low, border = expected.cumsum()[tokens] - expected[tokens], min(tolerance, 1e-6)
        assert (low - border <= numbers).all() and (numbers <= low + expected[tokens] + border).all()
    np.testing.assert_allclose(drawn.log_probs_R, np.log(expected[tokens]), atol=tolerance)
    np.testing.assert_allclose(drawn.untruncated_R, np.log(whole[tokens]), atol=tolerance)
    return tokens


CASES = {
    "plain": SamplingParams(), "tempered": SamplingParams(temperature=0.7), "top_k": SamplingParams(top_k=40),
    "top_p": SamplingParams(top_p=0.9), "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.3, min_p=0.02, top_k=60, top_p=0.95),
}  # fmt: skip


def count_draws(logits, params, draws, rows=20_000):
    counts = np.zeros(len(logits), dtype=np.int64)
    keys = np.arange(rows, dtype=np.uint64) * np.uint64(0x5851F42D4C957F2D)
    for position in range(draws // rows):
        tokens = draw(logits, params, uniforms(keys, np.full(rows, position))).tokens_R
        counts += np.bincount(tokens, minlength=len(logits))
    return counts


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution_and_four_percent_bias_is_seen(case):
    logits = np.random.default_rng(17).normal(size=24).astype(np.float32)
    params = replace(CASES[case], top_k=min(CASES[case].top_k, 14))
    expected = distribution(logits, params).probabilities
    kept = expected > 0
    assert kept.all() != params.truncated

    def p_value(counts):
        assert counts[~kept].sum() == 0
        return stats.chisquare(counts[kept], expected[kept] * counts.sum()).pvalue

    assert p_value(count_draws(logits, params, 100_000)) > 1e-3
    tilt = np.log1p(0.04 * (-1.0) ** np.arange(24)) * params.temperature
    biased = np.where(kept, logits + tilt, -np.inf).astype(np.float32)
    assert p_value(count_draws(biased, SamplingParams(temperature=params.temperature), 100_000)) < 1e-3


NUMBERS = np.append(np.linspace(0, ALMOST_ONE, 40), 0.37)
# With ties, and with tokens that cannot be drawn.
SOME = st.sampled_from([-torch.inf, -1.0, 0.0, 0.5, 0.5, 2.0])
LOGITS = st.lists(st.one_of(st.floats(-12, 12, width=32), SOME), min_size=1, max_size=140)
POSSIBLE = LOGITS.filter(lambda row: max(row) > -torch.inf)
MIN_P = st.sampled_from([0.0, 0.0, 0.003, 0.21, 1.0])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logits=POSSIBLE,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    min_p=MIN_P,
    top_k=st.sampled_from([-1, 0, 1, 2, 7, 100, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.63, 0.1, 1e-6]),
)
def test_whatever_the_cuts_tokens_and_log_probs_are_the_references(logits, **params):
    check_draws(torch.tensor(logits, dtype=torch.float64), SamplingParams(**params), NUMBERS)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    logits=POSSIBLE,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    min_p=MIN_P,
    top_p=st.sampled_from([0.999, 0.9, 0.63, 0.1, 1e-6]),
)
def test_a_nucleus_beyond_the_first_candidates_is_the_references(logits, **params):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_FIRST_CANDIDATES", 1)
        check_draws(torch.tensor(logits, dtype=torch.float64), SamplingParams(**params), NUMBERS)


@pytest.mark.parametrize(
    ("size", "scale", "params", "tolerance", "dtype"),
    [
        *((700, 2.0, params, 2e-5, torch.float32) for params in CASES.values()),
        *((1000, 1.0, SamplingParams(top_k=top_k), 2e-5, torch.float32) for top_k in (7, 400, 1000, 5000)),
        *((size, 3.0, SamplingParams(), 1e-5, torch.float32) for size in (1, 5, 128, 129, 1000)),
        *((size, 3.0, SamplingParams(), 1e-9, torch.float64) for size in (1, 5, 128, 129, 1000)),
        # Flat over 5,000 tokens: top-p keeps about 4,500, more than are sorted at first.
        (5000, 0.05, SamplingParams(top_p=0.9), 1e-3, torch.float32),
    ],
    ids=str,
)
def test_vocabularies_of_any_size(size, scale, params, tolerance, dtype):
    logits = torch.from_numpy(np.random.default_rng(size).normal(size=size) * scale).to(dtype)
    tokens = check_draws(logits, params, np.linspace(0, ALMOST_ONE, 1000), tolerance)
    assert size < 5000 or len(set(tokens.tolist())) > 700


@pytest.mark.parametrize(("params", "kept"), [
    (SamplingParams(top_k=1), {1, 3, 6}), (SamplingParams(top_k=4), {1, 2, 3, 5, 6}),
    (SamplingParams(top_p=0.1), {1, 3, 6}), (SamplingParams(min_p=1.0), {1, 3, 6}),
])  # fmt: skip
def test_tokens_as_likely_as_the_last_one_kept_are_kept(params, kept):
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 0.0, 1.0, 3.0])
    numbers = np.linspace(0, ALMOST_ONE, 200)
    assert set(draw(logits, params, numbers).tokens_R.tolist()) == kept
    flat = draw(torch.zeros(50), params, numbers)
    assert flat.tokens_R.unique().tolist() == list(range(50))
    np.testing.assert_allclose(flat.log_probs_R, -np.log(50), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_floor_that_is_searched_for_keeps_what_sorting_keeps(dtype):
    scores = (torch.randn(60, 700, dtype=dtype, generator=torch.Generator().manual_seed(3)) * 4).round() / 2
    scores[:, ::7] = -torch.inf
    scores[3] = 0.0
    scores[3, 5::2] = -0.0
    peak = scores.amax(-1)
    weights, ends = sampler._weights(scores, peak)
    goal = torch.linspace(1e-9, 1 - 1e-6, 60, dtype=torch.float64) * ends[:, -1]
    ordered = scores.sort(-1, descending=True).values
    below = ((ordered - peak[:, None]).exp().cumsum(-1, dtype=torch.float64) < goal[:, None]).sum(-1)
    last = ordered.gather(1, below[:, None])
    assert (last.isfinite()).all() and last.unique().numel() > 10
    floor = sampler._searched_floor(scores, weights, goal)
    assert torch.equal(scores >= floor[:, None], scores >= last)
    assert (sampler._searched_floor(scores, weights, 2 * ends[:, -1]) == -torch.inf).all()


@pytest.mark.parametrize("params", [*CASES.values(), SamplingParams(top_p=0.9, min_p=0.1)], ids=str)
def test_no_step_waits_for_the_device(params):
    """Tensors on the meta device have no content. A step that waits for content fails on them."""
    logits, numbers = torch.empty(3, 5000, device=META), torch.empty(3, dtype=torch.float64, device=META)
    drawn = sample(logits, numbers, row_params([params] * 3, 5000, META))
    assert all(part.shape == (3,) for part in drawn)


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.999)], ids=["plain", "top_p"])
def test_impossible_tokens_are_never_drawn(number, params):
    for possible in (0, 3, 127, 128, 299):
        logits = torch.full((300,), -torch.inf)
        logits[possible] = -5.0
        drawn = draw(logits, params, [number])
        assert (drawn.tokens_R.item(), drawn.log_probs_R.item()) == (possible, 0.0)


def test_rows_do_not_influence_each_other():
    rng = np.random.default_rng(9)
    logits, numbers = torch.from_numpy(rng.normal(size=(40, 900)) * 2), torch.from_numpy(rng.random(40))
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.5, "top_k": 3}, {"top_p": 0.99}]
    kinds.append({"min_p": 0.05, "temperature": 1.4})
    params = [SamplingParams(**kinds[row % 5]) for row in range(40)]
    together = sample(logits, numbers, row_params(params, 900))
    for row in range(40):
        alone = sample(logits[row : row + 1], numbers[row : row + 1], row_params([params[row]], 900))
        assert alone.tokens_R.item() == together.tokens_R[row].item()
        assert alone.log_probs_R.item() == pytest.approx(together.log_probs_R[row].item(), abs=1e-12)
        assert alone.untruncated_R.item() == pytest.approx(together.untruncated_R[row].item(), abs=1e-12)


def test_half_precision_logits_are_widened():
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    drawn = sample(logits, torch.tensor([0.3]), row_params([SamplingParams()], 5000))
    expected = logits.double().log_softmax(-1)[0, drawn.tokens_R]
    assert drawn.log_probs_R.dtype == torch.float32
    torch.testing.assert_close(drawn.log_probs_R.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"temperature": 0.0}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_nan(params, bad):
    logits = torch.zeros(2, 200)
    logits[1, 150] = bad
    drawn = sample(logits, torch.tensor([0.5, 0.5]), row_params([SamplingParams(**params)] * 2, 200))
    assert drawn.log_probs_R.isnan().tolist() == [False, True] and drawn.tokens_R.max() < 200
