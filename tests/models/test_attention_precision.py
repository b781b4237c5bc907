"""Packed attention in bf16 compared with float64, forward and backward.

On a CPU it uses rectangles, on CUDA variable-length kernels. Its errors are compared with those of a plain
bf16 implementation of attention.
"""

import math

import pytest
import torch

from tandem.models.attention import packed_attention
from tandem.models.packing import Packing

NAMES = ("output", "query", "key", "value")
HEADS = [(4, 1), (6, 2), (4, 4)]


def drawn(lengths, heads, key_heads, width, seed):
    """Draw query, key, value and the gradient of the output, (N, heads, width) in bf16.

    With these, the softmax is neither flat nor concentrated on one entry.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), count, width) for count in (heads, key_heads, key_heads, heads)]
    spread = (1.5, 1.5, 1.0, 1.0)
    return [
        (factor * torch.randn(shape, generator=draw, dtype=torch.float64)).to(torch.bfloat16)
        for factor, shape in zip(spread, shapes, strict=True)
    ]


def plainly(tensors, lengths, scale, dtype):
    """Return output and gradients, one sequence and head at a time, with every operator in that type."""
    q, k, v = (tensor.to(dtype).requires_grad_() for tensor in tensors[:3])
    group, rows = q.shape[1] // k.shape[1], []
    for q_i, k_i, v_i in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        mask = torch.full((len(q_i), len(q_i)), -math.inf, dtype=dtype, device=q.device).triu(1)
        heads = []
        for head in range(q.shape[1]):
            scores = q_i[:, head] @ k_i[:, head // group].T * scale + mask
            heads.append(torch.softmax(scores, -1) @ v_i[:, head // group])
        rows.append(torch.stack(heads, 1))
    out = torch.cat(rows)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype))]


def packed(tensors, lengths, scale, device):
    """Return output and gradients of Tandem's function, called as transformers calls it."""
    inputs = [tensor.to(device).requires_grad_() for tensor in tensors[:3]]
    handed = [tensor.unsqueeze(0).transpose(1, 2) for tensor in inputs]
    plan = Packing(lengths, torch.device(device))
    out, _ = packed_attention(torch.nn.Identity(), *handed, None, packing=plan, scaling=scale)
    return [out[0].detach(), *torch.autograd.grad(out[0], inputs, tensors[3].to(device))]


def errors(found, wanted, lengths):
    """Return the norms of the error and of the expected value, for the whole and for each sequence."""
    gap, wanted = found.cpu().double() - wanted, wanted.double()
    parts = zip(gap.split(lengths), wanted.split(lengths), strict=True)
    return gap.norm(), [(part.norm(), whole.norm()) for part, whole in parts]


def check(lengths, heads, key_heads, width, device, seed):
    tensors, scale = drawn(lengths, heads, key_heads, width, seed), width**-0.5
    exact = plainly(tensors, lengths, scale, torch.float64)
    obvious = plainly(tensors, lengths, scale, torch.bfloat16)
    found = packed(tensors, lengths, scale, device)
    for name, ours, theirs, wanted in zip(NAMES, found, obvious, exact, strict=True):
        (error, each), (allowed, others) = errors(ours, wanted, lengths), errors(theirs, wanted, lengths)
        assert 0 < error <= 2 * allowed, name
        # For a sequence of one token, the gradients of query and key are only rounding errors.
        for length, (part, size), (other, _) in zip(lengths, each, others, strict=True):
            assert part <= 2 * other + size / 128 + 1e-3, (name, length)


def lengths_of(seed, count, long):
    """Draw lengths. One sequence has one token, and one is longer than all others together."""
    draw = torch.Generator().manual_seed(seed)
    some = torch.randint(2, 2 * long // count // 3, (count,), generator=draw).tolist()
    return [some[0], 1, *some[1:3], long, *some[3:], 1]


@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
def test_on_a_cpu(heads, key_heads):
    """Scores of sequences of up to 512 tokens are materialized; the long one uses PyTorch's kernel."""
    lengths = lengths_of(heads + key_heads, count=6, long=700)
    assert max(lengths) > 512 and sorted(lengths)[-2] <= 512
    check(lengths, heads, key_heads, 32, "cpu", seed=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
def test_on_cuda(heads, key_heads, width):
    lengths = lengths_of(heads + key_heads, count=9, long=3000)
    check(lengths, heads, key_heads, width, "cuda", seed=width + heads)
