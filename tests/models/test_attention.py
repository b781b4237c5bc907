import math

import pytest
import torch

from tandem.errors import ModelError
from tandem.models import attention
from tandem.models.attention import packed_attention
from tandem.models.packing import Packing

CPU = torch.device("cpu")


def reference(query, key, value, lengths, scale):
    """Return attention (N, H, D) in float64, one sequence and head at a time."""
    out = torch.zeros(query.shape[2], query.shape[1], query.shape[3], dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        for head in range(query.shape[1]):
            q = query[0, head, rows].double()
            k, v = key[0, head // group, rows].double(), value[0, head // group, rows].double()
            scores = q @ k.T * scale + torch.full((length, length), -math.inf).double().triu(1)
            out[rows, head] = torch.softmax(scores, -1) @ v
        begin += length
    return out


def heads(total, count, dtype):
    """Return heads in the layout of transformers: (1, count, N, D) over memory (1, N, count, D)."""
    data = torch.randn(1, total, count, 16, dtype=torch.float64).to(dtype)
    return data.transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("lengths", [[9, 9, 9], [1, 20, 3, 17, 4, 1], [33]])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_equals_attention_of_each_sequence_alone(lengths, key_heads, dtype, tolerance):
    total = sum(lengths)
    inputs = [heads(total, n, dtype) for n in (4, key_heads, key_heads)]
    out, weights = packed_attention(
        torch.nn.Identity(), *inputs, None, packing=Packing(lengths, CPU), scaling=0.3
    )
    expected = reference(*inputs, lengths, 0.3)
    assert weights is None and out.shape == (1, total, 4, 16)
    assert (out[0].double() - expected).norm() <= tolerance * expected.norm()

    direction = torch.randn(total, 4, 16, dtype=torch.float64).to(dtype)
    got = torch.autograd.grad(out[0], inputs, direction)
    wanted = torch.autograd.grad(expected, inputs, direction.double())
    for g, w in zip(got, wanted, strict=True):
        assert (g.double() - w.double()).norm() <= tolerance * w.double().norm() + tolerance


def test_dense_and_flash_paths_agree(monkeypatch):
    inputs = [heads(60, n, torch.bfloat16) for n in (4, 2, 2)]
    plan = Packing([30, 30], CPU)
    dense, _ = packed_attention(torch.nn.Identity(), *inputs, None, packing=plan)
    monkeypatch.setattr(attention, "_DENSE_WIDTH", 0)
    flash, _ = packed_attention(torch.nn.Identity(), *inputs, None, packing=plan)
    assert not torch.equal(dense, flash)
    assert (dense - flash).float().norm() <= 1e-2 * flash.float().norm()


def test_default_scale_is_root_of_the_head_dimension():
    inputs = [heads(5, 2, torch.float64) for _ in range(3)]
    out, _ = packed_attention(torch.nn.Identity(), *inputs, None, packing=Packing([5], CPU))
    assert torch.allclose(out[0], reference(*inputs, [5], 0.25), atol=1e-12)


def test_what_it_cannot_do_is_said():
    inputs = [heads(12, 2, torch.float64) for _ in range(3)]
    module, plan = torch.nn.Identity(), Packing([12], CPU)
    with pytest.raises(ModelError, match="without a packing plan"):
        packed_attention(module, *inputs, None)
    with pytest.raises(ModelError, match="sliding window of 8"):
        packed_attention(module, *inputs, None, packing=plan, sliding_window=8)
    with pytest.raises(ModelError, match="softcap"):
        packed_attention(module, *inputs, None, packing=plan, softcap=30.0)
    packed_attention(module, *inputs, None, packing=plan, sliding_window=12)
