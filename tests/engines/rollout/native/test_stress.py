import numpy as np
import pytest
import torch

from tests.engines.rollout.case import request
from tests.engines.rollout.native import stress

AHEAD, GRAPHS = {"run_ahead": True}, {"graphs": True}
KINDS = {"window", "limit"}


def case(dtype, count, options, *marks):
    names = [str(dtype).removeprefix("torch."), str(count), *(f"{k}={v}" for k, v in options.items())]
    return pytest.param(dtype, count, options, marks=marks, id=",".join(names))


@pytest.mark.parametrize(("dtype", "count", "options"), [
    case(torch.float64, 50, AHEAD | GRAPHS), case(torch.float64, 50, GRAPHS, pytest.mark.slow),
    case(torch.float32, 50, {}), case(torch.float64, 50, AHEAD | GRAPHS | {"window": 11}),
    case(torch.float64, 50, AHEAD | GRAPHS | {"limit": 20}),
    case(torch.float64, 1_000, AHEAD | {"limit": 20}, pytest.mark.slow, pytest.mark.timeout(1800)),
    case(torch.float64, 1_000, AHEAD | {"window": 11}, pytest.mark.slow, pytest.mark.timeout(1800)),
    case(torch.float64, 50, GRAPHS | {"num_gpu_blocks_override": None}, pytest.mark.slow),
    case(torch.float64, 50, AHEAD | {"max_num_batched_tokens": 7}, pytest.mark.slow),
    case(torch.float64, 50, {"enable_prefix_caching": False}, pytest.mark.slow),
    case(torch.float64, 50, {"enable_chunked_prefill": False, "max_num_batched_tokens": 9}, pytest.mark.slow),
    case(torch.float64, 50, {"runner": "module", "max_num_seqs": 5, "block_size": 2}),
    case(torch.float64, 50, AHEAD | {"max_num_batched_tokens": 3, "num_gpu_blocks_override": 30}),
    case(torch.float64, 100, {}, pytest.mark.slow), case(torch.float64, 50, AHEAD, pytest.mark.slow),
    case(torch.float64, 10_000, AHEAD | GRAPHS, pytest.mark.slow, pytest.mark.timeout(1800)),
    case(torch.float32, 1_000, {}, pytest.mark.slow, pytest.mark.timeout(1800)),
    case(torch.float32, 1_000, AHEAD | GRAPHS, pytest.mark.slow, pytest.mark.timeout(1800)),
])  # fmt: skip
def test_every_request_is_answered_as_if_it_were_alone(dtype, count, options):
    roomy = {"num_gpu_blocks_override", "max_num_batched_tokens", "window"} & options.keys()
    requests = stress.random_requests(count, seed=1)
    module = stress.build_model(dtype, **{name: options[name] for name in KINDS & options.keys()})
    options = {name: value for name, value in options.items() if name not in KINDS}
    out = stress.stressed(module, requests, seed=2, **options)
    ties = stress.check_outcome(requests, out, stress.one_by_one(module, requests), dtype)
    assert ties <= max(count // 100, 1)
    assert (out.partial and out.dropped) or roomy
    assert out.stats["preemptions"] > 0 or dtype == torch.float32 or roomy


def test_a_tie_is_told_from_a_mistake():
    exact, greedy, nothing = stress.build_model(torch.float64), {"temperature": 0.0}, np.zeros(0, np.int64)
    with torch.no_grad():
        logits_V = exact(torch.tensor([[1, 2, 3]])).logits[0, -1]
    tokens = first, second = logits_V.topk(2).indices.tolist()
    bias = ((second, float(logits_V[first] - logits_V[second])),)
    assert not stress.is_tie(exact, request(**greedy), nothing, tokens)
    assert stress.is_tie(exact, request(**greedy, logit_bias=bias), nothing, tokens)
