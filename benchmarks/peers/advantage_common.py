"""The part of advantages.py that is the same for every side. Needs only PyTorch and NumPy."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Columns = dict[str, Any]
Estimate = Callable[[str, Columns, dict[str, Any]], tuple[Tensor, Tensor]]
"""Name, columns and options of an estimator → advantages and returns."""


class AdvantageSide:
    """Answers requests about estimators, in its own process.

    Args:
        estimate: calls an estimator.
        version: the version of the estimators' package.
        prepare: converts padded columns (B, T) to the form that `estimate` takes.
    """

    def __init__(
        self, estimate: Estimate, version: str, prepare: Callable[[Columns], Columns] = dict
    ) -> None:
        self._estimate = estimate
        self._version = version
        self._prepare = prepare

    def open(self, samples: int, tokens: int, holes: float, group: int, threads: int) -> str:
        """Make the inputs, which are the same on every side; return the version.

        Responses have `tokens` tokens, of which a share `holes` comes from a tool. Each prompt has `group`
        samples.
        """
        torch.set_num_threads(threads)
        draw = torch.Generator().manual_seed(0)
        shape = samples, tokens
        mask = torch.rand(shape, generator=draw) >= holes
        rewards = torch.randn(shape, generator=draw) * mask
        log_probs = -torch.rand(shape, generator=draw)
        columns = {
            "token_level_rewards": rewards,
            "values": torch.randn(shape, generator=draw),
            "response_mask": mask.long(),
            "old_log_probs": log_probs,
            "rollout_is_weights": torch.ones(shape),
            "sum_pi_squared": log_probs.exp() ** 2 + 0.1,
            "reward_baselines": torch.rand(samples, generator=draw),
            "reward_components": torch.rand(samples, 3, generator=draw),
            "group": torch.arange(samples) // group,
        }
        self._columns = self._prepare(columns)
        self._few = self._prepare({name: column[: 2 * group] for name, column in columns.items()})
        self._mix = torch.randn(samples * tokens, generator=draw)
        self._inside = mask.flatten()
        return f"{self._version}, torch {torch.__version__}"

    def first(self, name: str, options: dict[str, Any]) -> dict[str, float]:
        """Measure the first call on the whole batch, after a call on the samples of two prompts.

        `extra_bytes` is the peak of resident memory minus the memory before the call (Linux), results
        included. `projection`, of the advantages on random numbers, should be equal on every side.
        """
        self._estimate(name, self._few, options)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = _peak()
        advantages, _ = self._estimate(name, self._columns, options)
        extra = _peak() - before
        inside = advantages.flatten()[self._inside].double()
        return {"extra_bytes": extra, "projection": float(inside @ self._mix[self._inside].double())}

    def seconds(self, name: str, options: dict[str, Any]) -> tuple[float, float]:
        """Return the seconds of one call: wall-clock time, and processor time over all threads."""
        gc.collect()
        began, began_cpu = time.perf_counter(), time.process_time()
        self._estimate(name, self._columns, options)
        return time.perf_counter() - began, time.process_time() - began_cpu

    def methods(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self, name) for name in ("open", "first", "seconds")}


def _peak() -> int:
    """Return this process's peak of resident memory in bytes since the write to `clear_refs`."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
