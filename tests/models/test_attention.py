"""Packed attention compared with each sequence alone, forward and backward: rectangles, or CUDA kernels."""

import math

import pytest
import torch

from tandem.errors import ModelError
from tandem.models import rectangles
from tandem.models.attention import packed_attention
from tandem.models.masks import Mask
from tandem.models.packing import Packing

CPU = torch.device("cpu")
NAMES = ("output", "query", "key", "value")
HEADS = [(4, 1), (6, 2), (4, 4)]


def drawn(lengths, heads, key_heads, width, dtype, seed, value_width=None):
    """Draw query, key, value and the gradient of the output, (N, heads, width). No softmax is flat."""
    draw = torch.Generator().manual_seed(seed)
    other = value_width or width
    sizes = ((heads, width), (key_heads, width), (key_heads, other), (heads, other))
    shapes = [(sum(lengths), *size) for size in sizes]
    spread = (1.5, 1.5, 1.0, 1.0)
    return [
        (factor * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype)
        for factor, shape in zip(spread, shapes, strict=True)
    ]


def plainly(tensors, lengths, scale, dtype, *, window=0, chunk=0, softcap=0.0, sinks=None):
    """Return output and gradients, one sequence and head at a time, with every operator in that type."""
    q, k, v = (tensor.to(dtype).requires_grad_() for tensor in tensors[:3])
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    group, rows = q.shape[1] // k.shape[1], []
    for q_i, k_i, v_i in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        t = torch.arange(len(q_i))
        hidden = t[None, :] > t[:, None]
        hidden |= (t[None, :] <= t[:, None] - window) & (window > 0)
        hidden |= (t[None, :] // max(chunk, 1) != t[:, None] // max(chunk, 1)) & (chunk > 0)
        heads = []
        for head in range(q.shape[1]):
            scores = q_i[:, head] @ k_i[:, head // group].T * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(hidden, -math.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].to(dtype).expand(len(t), 1)], 1)
            heads.append(torch.softmax(scores, -1)[:, : len(t)] @ v_i[:, head // group])
        rows.append(torch.stack(heads, 1))
    out = torch.cat(rows)
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3].to(dtype))]


def packed(tensors, lengths, device="cpu", *, window=0, chunk=0, sinks=None, **options):
    """Return output and gradients of Tandem's function, called as transformers calls it."""
    inputs = [tensor.to(device).requires_grad_() for tensor in tensors[:3]]
    handed = [tensor.unsqueeze(0).transpose(1, 2) for tensor in inputs]
    mask = Mask(Packing(lengths, torch.device(device)), window, chunk)
    out, weights = packed_attention(torch.nn.Identity(), *handed, mask, s_aux=sinks, **options)
    assert weights is None and out.shape == (1, *tensors[3].shape)
    inputs += [] if sinks is None else [sinks]
    return [out[0].detach(), *torch.autograd.grad(out[0], inputs, tensors[3].to(device))]


@pytest.mark.parametrize(
    "options",
    [
        *({"window": 1}, {"window": 8}, {"chunk": 8}, {"window": 40, "softcap": 3.0}, {"sinks": True}),
        {"chunk": 7, "softcap": 2.0, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_windows_chunks_caps_and_sinks(options, key_heads, monkeypatch):
    """Compare with each sequence and head alone, for keys and values of different widths."""
    monkeypatch.setattr(rectangles, "_BLOCK", 16)
    monkeypatch.setattr(rectangles, "_DENSE_WIDTH", 40)
    lengths = [1, 60, 8, 9, 300, 33, 2]
    tensors = drawn(lengths, 4, key_heads, 16, torch.float64, seed=0, value_width=24)
    if "sinks" in options:
        options = options | {"sinks": torch.randn(4, dtype=torch.float64).requires_grad_()}
    found = packed(tensors, lengths, scaling=0.3, **options)
    wanted = plainly(tensors, lengths, 0.3, torch.float64, **options)
    for got, want in zip(found, wanted, strict=True):
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-12)


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
    monkeypatch.setattr(rectangles, "_DENSE_WIDTH", 0)
    flash = packed(tensors, [30, 30])[0]
    assert not torch.equal(dense, flash)
    assert (dense - flash).float().norm() <= 1e-2 * flash.float().norm()


def test_what_it_cannot_do_is_said():
    inputs, module, mask = [torch.ones(1, 2, 12, 16)] * 3, torch.nn.Identity(), Mask(Packing([12], CPU))
    for telling, attention_mask, options in (
        ("without a mask", None, {}),
        ("no layout", Mask(None), {}),
        ("position_bias", mask, {"position_bias": torch.ones(1)}),
    ):
        with pytest.raises(ModelError, match=telling):
            packed_attention(module, *inputs, attention_mask, **options)
    packed_attention(module, *inputs, mask)
