"""Packed attention compared with each sequence alone, forward and backward: rectangles, or CUDA kernels."""

import math

import pytest
import torch

from tandem.errors import ModelError
from tandem.models import attention
from tandem.models.attention import packed_attention
from tandem.models.packing import Packing

CPU = torch.device("cpu")
NAMES = ("output", "query", "key", "value")
HEADS = [(4, 1), (6, 2), (4, 4)]


def drawn(lengths, heads, key_heads, width, dtype, seed):
    """Draw query, key, value and the gradient of the output, (N, heads, width). No softmax is flat."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), count, width) for count in (heads, key_heads, key_heads, heads)]
    spread = (1.5, 1.5, 1.0, 1.0)
    return [
        (factor * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)
        for factor, shape in zip(spread, shapes, strict=True)
    ]


def plainly(tensors, lengths, scale, dtype):
    """Return output and gradients, one sequence and head at a time, with every operator in that type."""
    q, k, v = (tensor.to(dtype).requires_grad_() for tensor in tensors[:3])
    group, rows = q.shape[1] // k.shape[1], []
    for q_i, k_i, v_i in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        mask = torch.full((len(q_i), len(q_i)), -math.inf, dtype=dtype).triu(1)
        heads = []
        for head in range(q.shape[1]):
            scores = q_i[:, head] @ k_i[:, head // group].T * scale + mask
            heads.append(torch.softmax(scores, -1) @ v_i[:, head // group])
        rows.append(torch.stack(heads, 1))
    out = torch.cat(rows)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype))]


def packed(tensors, lengths, device="cpu", **options):
    """Return output and gradients of Tandem's function, called as transformers calls it."""
    inputs = [tensor.to(device).requires_grad_() for tensor in tensors[:3]]
    handed = [tensor.unsqueeze(0).transpose(1, 2) for tensor in inputs]
    plan = Packing(lengths, torch.device(device))
    out, weights = packed_attention(torch.nn.Identity(), *handed, None, packing=plan, **options)
    assert weights is None and out.shape == (1, *tensors[0].shape)
    return [out[0].detach(), *torch.autograd.grad(out[0], inputs, tensors[3].to(device))]


@pytest.mark.parametrize("lengths", [[9, 9, 9], [1, 20, 3, 17, 4, 1], [33]])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_equals_attention_of_each_sequence_alone(lengths, key_heads, dtype, tolerance):
    tensors = drawn(lengths, 4, key_heads, 16, dtype, seed=0)
    found, wanted = packed(tensors, lengths, scaling=0.3), plainly(tensors, lengths, 0.3, torch.float64)
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        allowed = tolerance * want.norm() + (tolerance if name != "output" else 0)
        assert (got.double() - want).norm() <= allowed, name
    if dtype == torch.float64:  # the default scale is the root of the head's width
        by_default, want = packed(tensors, lengths)[0], plainly(tensors, lengths, 0.25, dtype)[0]
        assert torch.allclose(by_default, want, atol=1e-12)


def errors(found, wanted, lengths):
    """Return the norms of the error and of the expected value, for the whole and for each sequence."""
    gap, wanted = found.cpu().double() - wanted, wanted.double()
    parts = zip(gap.split(lengths), wanted.split(lengths), strict=True)
    return gap.norm(), [(part.norm(), whole.norm()) for part, whole in parts]


@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
@pytest.mark.parametrize(
    ("device", "width", "count", "long"),
    [("cpu", 32, 6, 700), *(pytest.param("cuda", w, 9, 3000, marks=pytest.mark.gpu) for w in (64, 128))],
)
def test_bf16_is_as_exact_as_plain_attention(heads, key_heads, device, width, count, long):
    """On a CPU, scores of up to 512 tokens are materialized; the long sequence uses PyTorch's kernel."""
    draw = torch.Generator().manual_seed(heads + key_heads)
    some = torch.randint(2, 2 * long // count // 3, (count,), generator=draw).tolist()
    lengths, scale = [some[0], 1, *some[1:3], long, *some[3:], 1], width**-0.5
    assert sorted(lengths)[-2] <= 512 < long
    tensors = drawn(lengths, heads, key_heads, width, torch.bfloat16, seed=heads)
    exact, obvious = (plainly(tensors, lengths, scale, dtype) for dtype in (torch.float64, torch.bfloat16))
    found = packed(tensors, lengths, device, scaling=scale)
    for name, ours, theirs, wanted in zip(NAMES, found, obvious, exact, strict=True):
        (error, each), (allowed, others) = errors(ours, wanted, lengths), errors(theirs, wanted, lengths)
        assert 0 < error <= 2 * allowed, name
        # For a sequence of one token, the gradients of query and key are only rounding errors.
        for length, (part, size), (other, _) in zip(lengths, each, others, strict=True):
            assert part <= 2 * other + size / 128 + 1e-3, (name, length)


def test_dense_and_flash_paths_agree(monkeypatch):
    tensors = drawn([30, 30], 4, 2, 16, torch.bfloat16, seed=0)
    dense = packed(tensors, [30, 30])[0]
    monkeypatch.setattr(attention, "_DENSE_WIDTH", 0)
    flash = packed(tensors, [30, 30])[0]
    assert not torch.equal(dense, flash)
    assert (dense - flash).float().norm() <= 1e-2 * flash.float().norm()


def test_what_it_cannot_do_is_said():
    inputs, module, plan = [torch.ones(1, 2, 12, 16)] * 3, torch.nn.Identity(), Packing([12], CPU)
    for telling, options in (
        ("without a packing plan", {}),
        ("sliding window of 8", {"packing": plan, "sliding_window": 8}),
        ("softcap", {"packing": plan, "softcap": 30.0}),
    ):
        with pytest.raises(ModelError, match=telling):
            packed_attention(module, *inputs, None, **options)
    packed_attention(module, *inputs, None, packing=plan, sliding_window=12)
