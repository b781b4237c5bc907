"""Run on two ranks: FOLDER of a model, RESULTS to write. What each chooses where one of them has less memory,
and where its micro-batches are larger."""

import sys
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist

from tandem.engines.train import recomputation
from tandem.models.parallel import leave_distributed


def main():
    folder, results = (Path(argument) for argument in sys.argv[1:])
    heard, modes = [], []
    for free in ({0: 2**40, 1: 2**40}, {0: 2**40, 1: 0}):
        engine = synthetic.make_engine(folder, say=heard.append)
        rank = dist.get_rank()
        recomputation.host_free = lambda free=free, rank=rank: free[rank]
        batch = synthetic.make_batch()
        mine = batch[:7] if rank == 0 else batch[7:]
        synthetic.gradients(engine, mine, synthetic.SyntheticLoss(), synthetic.CUTS["three"])
        modes.append(engine._recomputation._switch.mode)
    found = {"heard": heard, "modes": modes, "tokens": engine._recomputation._tokens}
    torch.save(found, results / f"{rank}.pt")
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
