import numpy as np
import pytest
import torch
from scipy import stats

from tandem.engines.rollout.keyed import uniforms
from tandem.engines.rollout.sampler import RowParams, sample
from tandem.protocol import SamplingParams

CPU = torch.device("cpu")
ALMOST_ONE = 1 - 2.0**-53


def reference(logits, params):
    """Probabilities of one row, float64, by definition: temperature, then top-k, then top-p."""
    scaled = np.asarray(logits, dtype=np.float64) / (params.temperature or 1.0)
    weights = np.exp(scaled - scaled.max())
    probabilities = weights / weights.sum()
    order = np.argsort(-probabilities, kind="stable")
    kept = list(order[: params.top_k] if params.top_k > 0 else order)
    share = probabilities[kept] / probabilities[kept].sum()
    size = 1
    while size < len(kept) and share[:size].sum() < params.top_p:
        size += 1
    out = np.zeros_like(probabilities)
    out[kept[:size]] = probabilities[kept[:size]]
    return out / out.sum(), probabilities


def row_params(params, vocabulary):
    columns = zip(*((p.temperature, p.top_k, p.top_p) for p in params), strict=True)
    temperature, top_k, top_p = (np.array(column) for column in columns)
    return RowParams.of(temperature, top_k, top_p, vocabulary, CPU)


def draw(logits, params, numbers):
    """One draw per number, all from the same logits."""
    rows = torch.as_tensor(logits).expand(len(numbers), -1)
    return sample(
        rows,
        torch.as_tensor(numbers, dtype=torch.float64),
        row_params([params] * len(numbers), rows.shape[1]),
    )


def count_draws(logits, params, draws, rows=20_000):
    """How often each token is drawn."""
    counts = np.zeros(len(logits), dtype=np.int64)
    keys = np.arange(rows, dtype=np.uint64) * np.uint64(0x5851F42D4C957F2D)
    for position in range(draws // rows):
        tokens = draw(logits, params, uniforms(keys, np.full(rows, position))).tokens_R
        counts += np.bincount(tokens, minlength=len(logits))
    return counts


CASES = {
    "plain": SamplingParams(),
    "tempered": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=40),
    "top_p": SamplingParams(top_p=0.9),
    "both": SamplingParams(temperature=1.3, top_k=60, top_p=0.95),
}


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution_and_two_percent_bias_is_seen(case):
    rng = np.random.default_rng(17)
    logits = rng.normal(size=140).astype(np.float32)
    draws = 120_000 if CASES[case].truncated else 300_000
    expected, _ = reference(logits, CASES[case])
    kept = expected > 0

    def p_value(counts):
        assert counts[~kept].sum() == 0
        return stats.chisquare(counts[kept], expected[kept] * counts.sum()).pvalue

    assert p_value(count_draws(logits, CASES[case], draws)) > 1e-3
    tilt = np.log1p(0.02 * (-1.0) ** np.arange(140)) * (CASES[case].temperature)
    biased = np.where(kept, logits + tilt, -np.inf).astype(np.float32)
    untruncated = SamplingParams(temperature=CASES[case].temperature)
    assert p_value(count_draws(biased, untruncated, draws)) < 1e-3


@pytest.mark.parametrize("vocabulary", [1, 5, 128, 129, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverts_the_cumulative_distribution(vocabulary, dtype):
    rng = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(rng.normal(size=vocabulary) * 3).to(dtype)
    numbers = rng.random(500)
    drawn = draw(logits, SamplingParams(), numbers)
    probabilities, _ = reference(logits.numpy(), SamplingParams())
    ends = probabilities.cumsum()
    near_an_end = np.abs(ends[:, None] - numbers).min(0) < 1e-6
    expected = np.searchsorted(ends, numbers, side="right").clip(max=vocabulary - 1)
    assert (drawn.tokens_R.numpy() == expected)[~near_an_end].all()
    assert near_an_end.mean() < 0.05
    np.testing.assert_allclose(drawn.log_probs_R, np.log(probabilities[drawn.tokens_R]), atol=1e-5)


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_log_probs_of_both_distributions(params):
    rng = np.random.default_rng(23)
    logits = (rng.normal(size=700) * 2).astype(np.float32)
    drawn = draw(logits, params, rng.random(200))
    expected, untruncated = reference(logits, params)
    tokens = drawn.tokens_R.numpy()
    np.testing.assert_allclose(drawn.log_probs_R, np.log(expected[tokens]), atol=2e-5)
    np.testing.assert_allclose(drawn.untruncated_R, np.log(untruncated[tokens]), atol=2e-5)


def test_top_p_keeps_the_token_that_reaches_it():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    numbers = np.linspace(0, ALMOST_ONE, 50)
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2})):
        assert set(draw(logits, SamplingParams(top_p=top_p), numbers).tokens_R.tolist()) == kept


def test_top_p_beyond_the_first_candidates():
    """A flat distribution over 5,000 tokens: top-p keeps about 4,500, more than are sorted at first."""
    rng = np.random.default_rng(4)
    logits = (rng.normal(size=5000) * 0.05).astype(np.float32)
    params = SamplingParams(top_p=0.9)
    expected, _ = reference(logits, params)
    drawn = draw(logits, params, np.linspace(0, ALMOST_ONE, 3000))
    assert (expected[drawn.tokens_R] > 0).all()
    assert drawn.tokens_R.unique().numel() > 2000
    np.testing.assert_allclose(drawn.log_probs_R, np.log(expected[drawn.tokens_R]), atol=1e-3)


@pytest.mark.parametrize("top_k", [7, 400, 1000, 5000])
def test_top_k_of_any_size(top_k):
    logits = (np.random.default_rng(8).normal(size=1000)).astype(np.float32)
    params = SamplingParams(top_k=top_k)
    expected, _ = reference(logits, params)
    drawn = draw(logits, params, np.linspace(0, ALMOST_ONE, 3000))
    assert (expected[drawn.tokens_R] > 0).all()
    np.testing.assert_allclose(drawn.log_probs_R, np.log(expected[drawn.tokens_R]), atol=2e-5)


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.999)], ids=["plain", "top_p"])
def test_impossible_tokens_are_never_drawn(number, params):
    for possible in (0, 3, 127, 128, 299):
        logits = torch.full((300,), -torch.inf)
        logits[possible] = -5.0
        drawn = draw(logits, params, [number])
        assert drawn.tokens_R.item() == possible
        assert drawn.log_probs_R.item() == 0.0


def test_rows_do_not_influence_each_other():
    rng = np.random.default_rng(9)
    logits = torch.from_numpy(rng.normal(size=(40, 900)) * 2)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(top_p=0.99),
    ]
    params = [kinds[row % 4] for row in range(40)]
    numbers = torch.from_numpy(rng.random(40))
    together = sample(logits, numbers, row_params(params, 900))
    for row in range(40):
        alone = sample(logits[row : row + 1], numbers[row : row + 1], row_params([params[row]], 900))
        assert alone.tokens_R.item() == together.tokens_R[row].item()
        assert alone.log_probs_R.item() == pytest.approx(together.log_probs_R[row].item(), abs=1e-12)
        assert alone.untruncated_R.item() == pytest.approx(together.untruncated_R[row].item(), abs=1e-12)


def test_greedy_takes_the_peak_with_untempered_log_prob():
    logits = torch.tensor([[0.1, 2.0, -1.0], [3.0, 0.0, 0.0]])
    drawn = sample(logits, torch.tensor([0.99, 0.0]), row_params([SamplingParams(temperature=0.0)] * 2, 3))
    assert drawn.tokens_R.tolist() == [1, 0]
    torch.testing.assert_close(drawn.log_probs_R, logits.log_softmax(-1).amax(-1))


def test_half_precision_logits_are_widened():
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    drawn = sample(logits, torch.tensor([0.3]), row_params([SamplingParams()], 5000))
    expected = logits.double().log_softmax(-1)[0, drawn.tokens_R]
    assert drawn.log_probs_R.dtype == torch.float32
    torch.testing.assert_close(drawn.log_probs_R.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=2), SamplingParams(temperature=0.0)]
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_nan(params, bad):
    logits = torch.zeros(2, 200)
    logits[1, 150] = bad
    drawn = sample(logits, torch.tensor([0.5, 0.5]), row_params([params, params], 200))
    assert drawn.log_probs_R.isnan().tolist() == [False, True]
    assert drawn.tokens_R.max() < 200
