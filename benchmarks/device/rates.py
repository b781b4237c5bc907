"""Measure the basic rates of a device, which are the bounds for all other measurements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rates:
    """The best rates of a device.

    Attributes:
        copy: bytes/s, read and written, of a copy within device memory.
        product: operations/s of a square product of random bf16 matrices, 8192 wide.
        to_host, from_host: bytes/s between device memory and pinned host memory.
    """

    copy: float
    product: float
    to_host: float
    from_host: float


H100 = Rates(copy=3.0e12, product=798e12, to_host=50e9, from_host=50e9)
"""An H100 SXM. `copy` and `product` were measured once; the rates to and from the host are estimates."""


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle; on a CPU do nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run, from idle device to idle device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def seconds(work: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 3) -> float:
    """Return the median seconds of a run, after some warm-up runs."""
    for _ in range(warm_up):
        work()
    return statistics.median(clock(work, device) for _ in range(repeats))


def measure_rates(device: torch.device, *, tiny: bool = False) -> Rates:
    """Measure the rates of a device in less than a second; use small operands on a CPU or if `tiny`."""
    small = tiny or device.type != "cuda"
    elements, width = (2**24, 512) if small else (2**30, 8192)
    source = torch.empty(elements, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    copied = _each(lambda: target.copy_(source), device)
    host = torch.empty(elements // 2, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    half = target[: elements // 2]
    out = _each(lambda: host.copy_(half, non_blocking=True), device)
    back = _each(lambda: half.copy_(host, non_blocking=True), device)
    a, b = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    multiplied = _each(lambda: a @ b, device)
    return Rates(
        copy=2 * source.nbytes / copied,
        product=2 * width**3 / multiplied,
        to_host=host.nbytes / out,
        from_host=host.nbytes / back,
    )


def _each(work: Callable[[], object], device: torch.device, runs: int = 10) -> float:
    """Return the mean seconds of consecutive runs, after three warm-up runs."""

    def several() -> None:
        for _ in range(runs):
            work()

    for _ in range(3):
        work()
    return clock(several, device) / runs
