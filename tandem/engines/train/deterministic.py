"""Deterministic kernels, with which the same steps compute the same bits in every run.

On a CPU, PyTorch's kernels are always repeatable for the same shapes and the same number of threads. On CUDA,
some kernels add numbers in the order in which their threads finish. Most of these kernels have a
deterministic replacement, including the backward pass of attention. An operation without a replacement raises
an error. Gradients are summed over ranks in ring order.

Two environment variables stay set in the process, because cuBLAS and NCCL read them only once. The choice of
kernels applies only to the computations of the training engine. A rollout and other models in the process
keep their kernels.
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
_WORKSPACES = (":4096:8", ":16:8")  # the settings with which cuBLAS guarantees the same bits


def prepare(fsdp: FSDPConfig, device: torch.device) -> None:
    """Set the environment variables that deterministic kernels on a GPU need.

    Call this before an engine first uses its device, and before the engine's process group starts. Without
    `full_determinism`, and on a CPU, this function does nothing.

    Raises:
        ConfigError: the process has already started to compute with another setting of cuBLAS.
    """
    if not fsdp.full_determinism or device.type != "cuda":
        return
    given = os.environ.get(_WORKSPACE)
    if given is None and torch.cuda.memory_stats(device).get("allocation.all.allocated", 0) == 0:
        os.environ[_WORKSPACE] = _WORKSPACES[0]
    elif given not in _WORKSPACES:
        raise ConfigError(
            "with its workspaces in this process, cuBLAS does not guarantee the same bits in every run",
            field=FIELD,
            got=f"true with {_WORKSPACE} {'not set when the GPU was first used' if given is None else given}",
            expected=" or ".join(_WORKSPACES),
            remedy=f"start the run with {_WORKSPACE}={_WORKSPACES[0]} in the environment",
        )
    os.environ.setdefault("NCCL_ALGO", "Ring")


def repeatable(fsdp: FSDPConfig) -> AbstractContextManager[None]:
    """Return a context manager that allows only deterministic kernels, if the config requires them."""
    return deterministic_kernels() if fsdp.full_determinism else nullcontext()


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Allow only deterministic PyTorch kernels inside this context, and restore the setting afterwards.

    PyTorch would also fill new memory with NaN. This is switched off, because no kernel reads memory before
    writing to it.

    Raises:
        EngineError: an operation has no deterministic kernel.
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
            remedy="replace the operation if it is in your own loss, or set full_determinism=false",
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
