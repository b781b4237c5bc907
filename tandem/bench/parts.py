"""The worker and the rollout engine that a benchmark uses.

The policy's worker generates responses of given lengths and measures its device.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tandem.memory.seconds import Rates
from tandem.protocol import DataProto, Request, SamplingParams
from tandem.runtime import Dispatch, register
from tandem.workers.actor import ActorWorker
from tandem.workers.rollout_part import RolloutPart

LENGTHS = "response_tokens"
"""The key in a row's extra_info for the lengths of its responses."""


class GivenLengths(RolloutPart):
    """A rollout whose responses have the lengths in the data rows.

    Each request has a separate length limit. No token or text ends a response earlier.
    """

    def requests(self, prompts: DataProto, n: int, params: SamplingParams) -> list[Request]:
        asked = super().requests(prompts, n, params)
        given = [row.get(LENGTHS) for row in prompts.non_tensor_batch["extra_info"] for _ in range(n)]
        return [
            request
            if lengths is None
            else replace(
                request,
                params=replace(
                    request.params,
                    max_tokens=min(lengths[request.sample % len(lengths)], request.params.max_tokens),
                    min_tokens=0,
                    stop_token_ids=(),
                    stop=(),
                ),
            )
            for request, lengths in zip(asked, given, strict=True)
        ]


class BenchWorker(ActorWorker):
    """A worker of the policy that also measures its device."""

    rollout_part = GivenLengths

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def device_rates(self) -> tuple[dict[str, Any], Rates]:
        """Return facts about the policy's device, and the device's speeds with the compute dtype."""
        dtype = next(iter(self.engines.values())).compute_dtype
        name = f"{device_name(self.device)}, {str(dtype).rpartition('.')[2]}"
        return {"device": name, "bytes of a number": dtype.itemsize}, measure_rates(self.device, dtype)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or a CPU's processor and number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(named or [platform.machine()])[0]}, {torch.get_num_threads()} threads"


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the speeds of a device, in about a second.

    The speeds are the best of ten products of square matrices (width 8192 on a GPU, 1024 on a CPU), and the
    best of ten copies within the device's memory (512 MiB on a GPU, 128 MiB on a CPU).
    """
    on_cuda = device.type == "cuda"
    width, size = (8192, 512 << 20) if on_cuda else (1024, 128 << 20)
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def best(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(12):
            began = time.perf_counter()
            work()
            if on_cuda:
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - began)
        return min(taken[2:])

    product, copy = best(lambda: a @ b), best(lambda: target.copy_(source))
    return Rates(2 * width**3 / product, 2 * size / copy)
