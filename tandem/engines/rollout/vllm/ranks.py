"""Tools for ranks that share one vLLM engine: each rank runs a shard of every layer in its own process.

Each rank has its own scheduler. All ranks plan the same steps, because all ranks get the same requests and
calls in the same order. The ranks do not exchange their plans. So everything that a plan depends on must be
the same on all ranks. The ranks compare the tokens that they generate.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.aux_output_connector import worker as recorders
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from tandem.errors import EngineError
from tandem.models.parallel import collective_timeout

_SHARED_MEMORY = Path("/dev/shm")
# Each rank has its own scheduler, so each rank keeps the recorded experts. vLLM would keep them on the first.
recorders.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)


class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """An executor of vLLM for ranks that another program has launched.

    The ranks are members of an existing process group. On a CPU the ranks exchange data through shared-memory
    files, whose names are unique to this run.

    Attributes:
        meeting: The common prefix of the names of the shared-memory files.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        for file in _SHARED_MEMORY.glob(
            f"{self.meeting}-*"
        ):  # all ranks have opened the file, so it may be deleted
            file.unlink(missing_ok=True)

    def _distributed_args(self) -> tuple[str, int, int]:
        """Return the address, the rank and the local rank. The end of the address becomes the file prefix."""
        _, rank, local_rank = super()._distributed_args()
        name = [secrets.token_hex(8)]
        dist.broadcast_object_list(name)
        self.meeting = name[0]
        return f"tandem:{self.meeting}", rank, local_rank


def rank_arguments(tensor_parallel_size: int) -> dict[str, Any]:
    """Return vLLM's arguments for one of several ranks.

    The result is empty in a process that runs alone.

    Args:
        tensor_parallel_size: The number of consecutive ranks that share an engine.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    limit_s = int(collective_timeout().total_seconds())
    return {
        "tensor_parallel_size": tensor_parallel_size,
        "distributed_executor_backend": RankExecutor,
        "disable_custom_all_reduce": True,  # this needs a process that sees the GPUs of the other ranks
        "distributed_timeout_seconds": limit_s,
        "cpu_distributed_timeout_seconds": limit_s,
    }


def gather(mine: torch.Tensor) -> torch.Tensor:
    """Gather a tensor from each rank that shares the engine. The rank is the new first dimension.

    Args:
        mine: A tensor on the host, with the same shape on all ranks.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return mine[None]
    parts = [torch.empty_like(mine) for _ in range(group.world_size)]
    dist.all_gather(parts, mine, group=group.cpu_group)
    return torch.stack(parts)


def check_same_tokens(written: int, over: bool = False) -> bool:
    """Check that all ranks generated the same tokens, and return the first rank's value of `over`.

    All ranks must stop after the same step, but their clocks differ. So the first rank decides.

    Args:
        written: A checksum of this rank's tokens.
        over: Whether the time limit has passed on this rank.

    Raises:
        EngineError: A rank has generated other tokens. All ranks raise this error.
    """
    of_ranks = gather(torch.tensor([written, over])).tolist()
    if len({number for number, _ in of_ranks}) > 1:
        raise EngineError(
            "the ranks that share one vLLM engine have generated different tokens",
            got=", ".join(f"rank {rank}: {number:08x}" for rank, (number, _) in enumerate(of_ranks)),
            expected="the same tokens on all ranks",
            remedy="set actor_rollout_ref.rollout.tensor_model_parallel_size=1, or "
            "actor_rollout_ref.rollout.name=native",
        )
    return bool(of_ranks[0][1])
