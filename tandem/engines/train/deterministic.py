"""The same bits in every run of the same steps.

On a CPU PyTorch's kernels repeat for the same shapes and the same number of threads, whether this is asked
for or not. On CUDA some add in the order in which their threads happen to arrive; for most of these there is
another kernel, for attention's backward too, and the rest is refused. Gradients are then summed over ranks
in the order of a ring.

Two variables of the environment stay set in the process: cuBLAS and NCCL read theirs once. The choice of
kernels holds for the engine's own work alone: a rollout and other models of the process keep theirs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tandem.config.fsdp import FSDPConfig
from tandem.errors import ConfigError, EngineError

FIELD = "fsdp_config.full_determinism"
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")  # those with which cuBLAS promises the same bits


def prepare(fsdp: FSDPConfig, device: torch.device) -> None:
    """Before an engine's first work on its device, and before its process group starts. Without
    `full_determinism`, and on a CPU, nothing is to be done.

    Raises:
        ConfigError: the process has begun to compute with another setting of cuBLAS.
    """
    if not fsdp.full_determinism or device.type != "cuda":
        return
    given = os.environ.get(_WORKSPACE)
    if given is None and torch.cuda.memory_stats(device).get("allocation.all.allocated", 0) == 0:
        os.environ[_WORKSPACE] = _WORKSPACES[0]
    elif given not in _WORKSPACES:
        raise ConfigError(
            "cuBLAS does not promise the same bits with the workspaces it has in this process",
            field=FIELD,
            got=f"true with {_WORKSPACE} {'not set when the GPU was first used' if given is None else given}",
            expected=" or ".join(_WORKSPACES),
            remedy=f"start the run with {_WORKSPACE}={_WORKSPACES[0]} in the environment",
        )
    os.environ.setdefault("NCCL_ALGO", "Ring")


def repeatable(fsdp: FSDPConfig) -> AbstractContextManager[None]:
    """Inside, deterministic kernels alone, where the config asks for it."""
    return deterministic_kernels() if fsdp.full_determinism else nullcontext()


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Inside, PyTorch takes deterministic kernels alone; afterwards it chooses as before. New memory is not
    filled with NaN first, as PyTorch would: nothing reads it before it is written.

    Raises:
        EngineError: an operation that has none.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise EngineError(
            "an operation has no deterministic kernel",
            field=FIELD,
            got=str(error).split(", but you set")[0].split(" does not have")[0],
            remedy="replace it, where it is in a loss of your own, or set full_determinism=false",
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
