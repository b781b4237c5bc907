"""Ranks that share one vLLM engine, each with its part of every layer in its own process.

Each rank has a scheduler of its own and plans the same steps, since all get the same requests and calls in
the same order. Nothing tells them of each other's plans, so that whatever a plan depends on must be the same
on all of them; what they have written is compared.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from tandem.errors import EngineError
from tandem.models.parallel import collective_timeout

_SHARED_MEMORY = Path("/dev/shm")


class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """vLLM's executor for ranks that something else has launched, as members of the process group that they
    have. On a CPU they meet in shared memory, under a name that no other run on the machine has.

    Attributes:
        meeting: that name, the first part of their files'.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        for file in _SHARED_MEMORY.glob(f"{self.meeting}-*"):  # all have met: no end of a process leaves it
            file.unlink(missing_ok=True)

    def _distributed_args(self) -> tuple[str, int, int]:
        """The address, whose last part becomes the name, rank and local rank."""
        _, rank, local_rank = super()._distributed_args()
        name = [secrets.token_hex(8)]
        dist.broadcast_object_list(name)
        self.meeting = name[0]
        return f"tandem:{self.meeting}", rank, local_rank


def among_ranks(tensor_parallel_size: int) -> dict[str, Any]:
    """vLLM's arguments in one of several ranks, of which so many neighbours share an engine; none in a
    process that is alone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    limit_s = int(collective_timeout().total_seconds())
    return {
        "tensor_parallel_size": tensor_parallel_size,
        "distributed_executor_backend": RankExecutor,
        "disable_custom_all_reduce": True,  # for it a process must see the others' GPUs, too
        "distributed_timeout_seconds": limit_s,
        "cpu_distributed_timeout_seconds": limit_s,
    }


def gathered(mine: torch.Tensor) -> torch.Tensor:
    """A tensor of each rank that shares the engine, with the rank as a new first dimension.

    Args:
        mine: on the host; of the same shape on all ranks.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return mine[None]
    parts = [torch.empty_like(mine) for _ in range(group.world_size)]
    dist.all_gather(parts, mine, group=group.cpu_group)
    return torch.stack(parts)


def agreed(written: int, over: bool = False) -> bool:
    """Compares what the ranks have written, and tells whether the time is over on the first of them: their
    clocks differ, and they have to stop after the same step.

    Args:
        written: a checksum of this rank's tokens.
        over: whether this rank's time is.

    Raises:
        EngineError: one has written something else; on all ranks.
    """
    of_ranks = gathered(torch.tensor([written, over])).tolist()
    if len({number for number, _ in of_ranks}) > 1:
        raise EngineError(
            "the ranks that share one vLLM engine have written different tokens",
            got=", ".join(f"rank {rank}: {number:08x}" for rank, (number, _) in enumerate(of_ranks)),
            expected="the same on all",
            remedy="set actor_rollout_ref.rollout.tensor_model_parallel_size=1, or "
            "actor_rollout_ref.rollout.name=native",
        )
    return bool(of_ranks[0][1])
