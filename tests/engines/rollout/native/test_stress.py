"""Hundreds of random requests, with aborts, on a very small cache. `make stress` runs thousands."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.protocol import Request, SamplingParams
from tests.engines.rollout.native import stress

SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("dtype", "count", "run_ahead", "graphs"),
    [
        pytest.param(torch.float64, 100, False, False, marks=pytest.mark.slow),
        (torch.float64, 50, True, True),
        pytest.param(torch.float64, 50, True, False, marks=pytest.mark.slow),
        (torch.float64, 50, False, True),
        (torch.float32, 50, False, False),
        pytest.param(torch.float64, 10_000, True, True, marks=SLOW),
        pytest.param(torch.float32, 10_000, False, False, marks=SLOW),
        pytest.param(torch.float32, 1_000, True, True, marks=SLOW),
    ],
)
def test_every_request_is_answered_as_if_it_were_alone(
    dtype: torch.dtype, count: int, run_ahead: bool, graphs: bool
) -> None:
    requests = stress.random_requests(count, seed=1)
    module = stress.build_model(dtype)
    out = stress.stressed(module, requests, seed=2, run_ahead=run_ahead, graphs=graphs)
    ties = stress.check_outcome(requests, out, stress.one_by_one(module, requests), dtype)
    assert ties <= max(count // 100, 1)
    assert out.partial and out.dropped
    assert dtype == torch.float32 or out.stats["preemptions"] > 0


def test_a_tie_is_told_from_a_mistake() -> None:
    """Greedy sampling over two equal logits is a tie. Over different logits it is not."""
    exact = stress.build_model(torch.float64)
    request = Request("p", 0, np.array([1, 2, 3]), SamplingParams(temperature=0.0, max_tokens=4))
    with torch.no_grad():
        logits_V = exact(torch.tensor([[1, 2, 3]])).logits[0, -1]
        first, second = logits_V.topk(2).indices.tolist()
    assert not stress.is_tie(exact, request, np.zeros(0, dtype=np.int64), (first, second))
    bias = ((second, float(logits_V[first] - logits_V[second])),)
    params = SamplingParams(temperature=0.0, max_tokens=4, logit_bias=bias)
    tied = Request("p", 0, np.array([1, 2, 3]), params)
    assert stress.is_tie(exact, tied, np.zeros(0, dtype=np.int64), (first, second))
