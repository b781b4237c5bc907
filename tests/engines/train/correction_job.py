"""A job for two ranks that computes gradients of corrected losses.

Arguments: FOLDER of the model, BATCH of ten rows, RESULTS file to write.
"""

import sys
from pathlib import Path

import corrected
import synthetic
import torch
import torch.distributed as dist

from tandem.models.parallel import leave_distributed
from tandem.protocol import DataProto


def main():
    folder, rows, results = map(Path, sys.argv[1:])
    engine = synthetic.make_engine(folder)
    batch = DataProto.load(rows)
    found = {}
    for name in (*corrected.SETTINGS, *corrected.BYPASSES):
        for share, cut in ((7, "three"), (10, "all")):  # the second rank has three rows, or none
            mine = batch[:share] if dist.get_rank() == 0 else batch[share:]
            loss = corrected.loss_of(name, "seq-mean-token-mean")
            found[name, share] = synthetic.gradients(engine, mine, loss, synthetic.CUTS[cut])
    if dist.get_rank() == 0:
        torch.save(found, results)
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
