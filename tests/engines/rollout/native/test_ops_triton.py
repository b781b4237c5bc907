"""Tests of the Triton ops against `TorchOps` in float64.

`test_paged_attention` says where they run.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tandem.engines.rollout.native.ops.base import Heads
from tandem.engines.rollout.native.ops.torch import TorchOps
from tandem.engines.rollout.native.ops.triton import TritonOps

pytestmark = [pytest.mark.triton, pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, EPS = 5, 1e-3
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def both(dtype, heads=3, kv_heads=1, dim=24):
    """Return Triton ops of this dtype, and PyTorch ops in float64."""
    angles = [random(50, dim, seed=seed).to(dtype) for seed in (1, 2)]
    made = Heads(heads, kv_heads, dim, *angles, dim**-0.5)
    wide = Heads(heads, kv_heads, dim, *(part.double() for part in angles), dim**-0.5)
    return TritonOps(made, EPS), TorchOps(wide, EPS)


def close(actual, expected):
    limit = LIMITS[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("size", [16, 100, 896])
def test_norms(size, dtype):
    ops, plain = both(dtype)
    x, added, weight = (random(*shape).to(dtype) for shape in ((ROWS, size), (ROWS, size), (size,)))
    close(ops.norm(x, None, weight)[1], plain.norm(x.double(), None, weight.double())[1])
    total, normed = ops.norm(x.clone(), added, weight)
    close(total, x.double() + added.double())
    close(normed, plain.norm(total.double(), None, weight.double())[1])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 24), (4, 2, 64), (7, 7, 16)])
def test_rotation(heads, kv_heads, dim, normed, dtype):
    ops, plain = both(dtype, heads, kv_heads, dim)
    qkv = random(ROWS, (heads + 2 * kv_heads) * dim, seed=3).to(dtype)
    norm = random(heads + kv_heads, dim, seed=4).to(dtype) if normed else None
    positions = torch.tensor([0, 49, 7, 7, 31], device=DEVICE)
    expected = plain.rotate(qkv.double(), positions, None if norm is None else norm.double())
    for part, wanted in zip(ops.rotate(qkv, positions, norm), expected, strict=True):
        assert part.dtype == dtype
        close(part, wanted)


@pytest.mark.parametrize("size", [48, 1024, 1500])
def test_gate(size, dtype):
    ops, plain = both(dtype)
    gate_up = 3 * random(ROWS, 2 * size).to(dtype)
    close(ops.gate(gate_up), plain.gate(gate_up.double()))
