import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tandem.engines.rollout.draws.sampler import RowParams, sample
from tandem.engines.rollout.draws.sampler_triton import sample_uncut

pytestmark = pytest.mark.triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def both(logits, uniforms, temperature):
    """Return (tokens, log-probs) of the kernels, and of the PyTorch sampler in float64."""
    rows, vocabulary = logits.shape
    uncut = np.zeros(rows, np.int64), np.ones(rows), np.zeros(rows)
    plain = RowParams.of(np.asarray(temperature, np.float64), *uncut, vocabulary, DEVICE)
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64, device=DEVICE)
    fused = sample_uncut(logits, uniforms, plain.temperature_R, plain.greedy_R)
    expected = sample(logits.double(), uniforms, plain)
    return fused, (expected.tokens_R, expected.log_probs_R)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [5, 4096, 10_007])
def test_draws_what_the_plain_sampler_draws(vocabulary, dtype):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(24, vocabulary, generator=generator)).to(DEVICE, dtype)
    rng = np.random.default_rng(vocabulary)
    drawn = both(logits, rng.random(24), rng.choice([0.0, 0.3, 0.7, 1.0, 2.0], 24))
    (tokens, log_probs), (expected, expected_log_probs) = drawn
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(log_probs.double(), expected_log_probs, rtol=1e-6, atol=2e-6)


def test_impossible_tokens_are_never_drawn_and_greedy_takes_the_first_of_equals():
    logits = torch.full((4, 9000), -torch.inf, device=DEVICE)
    logits[:, [4200, 8999]] = 0.0
    (tokens, log_probs), _ = both(logits, [0.0, 0.5, 1 - 2.0**-53, 0.9], [1.0, 0.5, 1.0, 0.0])
    assert tokens.tolist() == [4200, 8999, 8999, 4200]
    torch.testing.assert_close(log_probs.cpu(), torch.full((4,), 0.5).log())


def test_rows_without_a_distribution_have_nan_log_probs_and_a_valid_token():
    logits = torch.zeros(4, 9000, device=DEVICE)
    logits[0, 8500] = torch.nan
    logits[1] = -torch.inf
    logits[2, 100] = torch.inf
    (tokens, log_probs), _ = both(logits, [0.3] * 4, [1.0, 0.7, 1.0, 1.0])
    assert log_probs.isnan().tolist() == [True, True, True, False]
    assert bool(((tokens >= 0) & (tokens < 9000)).all())


def test_rows_may_lie_apart_and_are_left_alone():
    wide = torch.randn(4, 2, 6000, device=DEVICE)
    before = wide.clone()
    (tokens, _), (expected, _) = both(wide[:, 1], [0.1, 0.4, 0.6, 0.9], [1.0, 1.0, 0.5, 0.0])
    assert tokens.tolist() == expected.tolist()
    assert torch.equal(wide, before)
    (across, _), _ = both(wide[:, 1].T.contiguous().T, [0.1, 0.4, 0.6, 0.9], [1.0, 1.0, 0.5, 0.0])
    assert across.tolist() == tokens.tolist()
