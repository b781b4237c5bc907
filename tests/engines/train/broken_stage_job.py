"""A job for two ranks whose loss raises on the last pipeline stage.

Each rank writes the error that it met and the seconds until then. Arguments: FOLDER of a model, RESULTS
folder.
"""

import sys
import time
from pathlib import Path

import pipeline_models
import synthetic
import torch
import torch.distributed as dist

from tandem.errors import DataError
from tandem.models.parallel import init_distributed


class BrokenLoss(synthetic.SyntheticLoss):
    def __call__(self, out, columns, offsets, counts):
        raise DataError("the loss does not like it")


def main():
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    engine = synthetic.make_engine(folder, fsdp=pipeline_models.PIPE)
    began = time.monotonic()
    try:
        engine.train_step(synthetic.make_batch(), BrokenLoss(), micro=synthetic.CUTS["three"])
        met = "nothing"
    except (DataError, RuntimeError) as error:
        met = f"{type(error).__name__}: {error}"
    torch.save((met, time.monotonic() - began), results / f"{dist.get_rank()}.pt")
    if dist.get_rank() == 1:
        time.sleep(15)  # stay alive, so that no closed connection tells the other rank of the error


if __name__ == "__main__":
    init_distributed(torch.device("cpu"), timeout_s=6)
    main()
