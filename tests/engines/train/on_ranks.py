"""Calls a function on several ranks of this machine. Run as a script, this file is one of the ranks."""

import pickle
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.models.parallel import init_distributed, leave_distributed
from tests.support.ranks import run_ranks


def on_ranks(function, *arguments, ranks=2, collective_s=120, together=True):
    """Return what `function(*arguments)` returns on each rank, in the order of the ranks.

    Each rank imports the function's module. A collective may take `collective_s` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((function, arguments, collective_s, together)))
        run_ranks(__file__, call, ranks=ranks, timeout=500)
        return [torch.load(f"{call}.{rank}", weights_only=False) for rank in range(ranks)]


def gathered(value):
    """Return this value of every rank, in the order of the ranks."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


def seven_or_three(batch, share=7):
    """Return the first rows on the first of two ranks and the rest on the second; all of them on one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return batch
    return batch[:share] if dist.get_rank() == 0 else batch[share:]


def main(call):
    function, arguments, collective_s, together = pickle.loads(Path(call).read_bytes())
    init_distributed(torch.device("cpu"), timeout_s=collective_s)
    torch.save(function(*arguments), f"{call}.{dist.get_rank()}")
    if together:
        leave_distributed(together=True)


if __name__ == "__main__":
    main(sys.argv[1])
