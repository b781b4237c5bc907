"""The part of log_prob_head.py that is the same for every side. Needs only PyTorch."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Head = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""hidden (M, D), weight (V, D), targets (M) and temperature → log-probs (M) and entropies (M)."""


class HeadSide:
    """Answers requests about one head, in its own process."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def open(self, tokens: int, hidden: int, vocabulary: int, temperature: float, threads: int) -> str:
        """Make the inputs, which are the same on every side, and warm up; return PyTorch's version."""
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(0)
        self._hidden = torch.randn(tokens, hidden, generator=generator).bfloat16().requires_grad_()
        self._weight = (0.05 * torch.randn(vocabulary, hidden, generator=generator)).bfloat16()
        self._weight.requires_grad_()
        self._targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
        self._mix = torch.randn(2, tokens, generator=generator)
        self._temperature = temperature
        self._run(self._hidden[:8].detach(), self._weight[:64].detach().requires_grad_(), 8)
        return torch.__version__

    def _run(self, hidden: Tensor, weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        targets = self._targets[:rows] % len(weight)
        log_probs, entropy = self._head(hidden, weight, targets, self._temperature)
        (self._mix[0, :rows] * log_probs + self._mix[1, :rows] * entropy).sum().backward()
        return log_probs, entropy

    def _whole(self) -> tuple[Tensor, Tensor]:
        self._hidden.grad = self._weight.grad = None
        return self._run(self._hidden, self._weight, len(self._hidden))

    def first(self, rows: int) -> dict[str, Any]:
        """Measure the first forward and backward.

        `extra_bytes` is the peak of resident memory minus the memory before, without the weight's gradient
        (Linux). The other values should be equal on every side. The errors are the largest differences to
        float64 in the first `rows` rows.
        """
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = _resident("VmRSS")
        log_probs, entropy = self._whole()
        extra = _resident("VmHWM") - before - self._weight.nbytes
        wide = self._weight.detach().double()
        log_p = torch.log_softmax(self._hidden[:rows].detach().double() @ wide.T / self._temperature, -1)
        exact = log_p.gather(1, self._targets[:rows, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        assert self._hidden.grad is not None and self._weight.grad is not None
        return {
            "extra_bytes": extra,
            "log_prob_error": (log_probs[:rows] - exact[0]).abs().max().item(),
            "entropy_error": (entropy[:rows] - exact[1]).abs().max().item(),
            "hidden_gradient_norm": self._hidden.grad.float().norm().item(),
            "weight_gradient_norm": self._weight.grad.float().norm().item(),
        }

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of a forward and backward: wall-clock, and processor time of all threads."""
        began, began_cpu = time.perf_counter(), time.process_time()
        self._whole()
        return time.perf_counter() - began, time.process_time() - began_cpu

    def product_seconds(self) -> tuple[float, float]:
        """Return both times of one product hidden weightᵀ, which is 2 M D V operations."""
        with torch.no_grad():
            began, began_cpu = time.perf_counter(), time.process_time()
            self._hidden @ self._weight.T
            return time.perf_counter() - began, time.process_time() - began_cpu

    def methods(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self, name) for name in ("open", "first", "seconds", "product_seconds")}


def _resident(kind: str) -> int:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))
