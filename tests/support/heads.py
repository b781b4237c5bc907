"""Outputs and gradients of an output head, compared with softmax over all logits at once, in float64."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.models.heads import tiled


def log_softmax(hidden, weight, temperature, softcap=0.0):
    """Return (M, V) log-probs of (M, D) and (V, D), computed in the plain way in float64."""
    logits = hidden.double() @ weight.double().T / temperature
    return torch.log_softmax(softcap * torch.tanh(logits / softcap) if softcap else logits, -1)


def reference(hidden, weight, targets, temperature, softcap=0.0):
    """Return (log-probs, entropies) of (M, D), (V, D) and (M)."""
    log_p = log_softmax(hidden, weight, temperature, softcap)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def make_case(rows, vocabulary, width, dtype, *, scale=1.0, seed=0, device="cpu"):
    """Return random states and weights, and targets that include the first and the last entry."""
    generator = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(rows, width, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocabulary, width, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[:1], targets[1:2] = 0, vocabulary - 1
    leaves = [values.to(device, dtype).requires_grad_() for values in (hidden, weight)]
    return *leaves, targets.to(device)


def check_head(head, hidden, weight, targets, temperature, tolerance, softcap=0.0):
    """Check values and gradients of a random mix within `tolerance` of their sizes or their factors'."""
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    expected = reference(*wide, targets, temperature, softcap)
    options = {"temperature": temperature, "with_entropy": True, "softcap": softcap}
    got = head(hidden, weight, targets, **options)
    out_type = torch.promote_types(hidden.dtype, torch.float32)
    for value, want in zip(got, expected, strict=True):
        assert value.dtype == out_type and value.shape == want.shape
        assert bool(((value - want).abs() <= tolerance * (1 + want.abs())).all()), (value - want).abs().max()

    mix = torch.randn(2, len(hidden), dtype=torch.float64, device=hidden.device)
    (mix[0] * expected[0] + mix[1] * expected[1]).sum().backward()
    found = torch.autograd.grad((mix[0] * got[0] + mix[1] * got[1]).sum(), (hidden, weight))
    for gradient, leaf, other in zip(found, wide, reversed(wide), strict=True):
        assert gradient.shape == leaf.shape
        allowed = tolerance * (leaf.grad.norm() + mix.norm() * other.detach().norm() / temperature)
        assert (gradient.double() - leaf.grad).norm() <= allowed


def cut(monkeypatch, width):
    monkeypatch.setattr(tiled, "_LEAST_TILE", width)
    monkeypatch.setitem(tiled.TILE_BYTES, "cpu", 1)


class Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.nbytes)
        return out
