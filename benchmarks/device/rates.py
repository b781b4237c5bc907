"""Rates of a device, measured: the bounds that everything else is a share of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rates:
    """What a device does at its best.

    Attributes:
        copy: bytes/s, read and written, of a copy within its memory.
        product: operations/s of a square product of random bf16 matrices, 8192 wide.
        to_host, from_host: bytes/s between its memory and pinned memory of the host.
    """

    copy: float
    product: float
    to_host: float
    from_host: float


H100 = Rates(copy=3.0e12, product=798e12, to_host=50e9, from_host=50e9)
"""An H100 SXM, as it was once measured; what lies between it and the host is an estimate."""


def synchronize(device: torch.device) -> None:
    """Waits for all that was launched; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, from an idle device to an idle device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def seconds(work: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 3) -> float:
    """The median time of a run of the work, after some to warm up."""
    for _ in range(warm_up):
        work()
    return statistics.median(clock(work, device) for _ in range(repeats))


def measure_rates(device: torch.device, *, tiny: bool = False) -> Rates:
    """The rates of a device, in less than a second; on a CPU, and where `tiny`, of small operands."""
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
    """Mean seconds of runs that follow each other, after three to warm up."""

    def several() -> None:
        for _ in range(runs):
            work()

    for _ in range(3):
        work()
    return clock(several, device) / runs
