"""A job for two ranks that takes three steps with deterministic kernels.

Arguments: FOLDER of the model, RESULTS file to write.
"""

import sys
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist

from tandem.models.parallel import init_distributed, leave_distributed


def main():
    folder, results = (Path(argument) for argument in sys.argv[1:])
    init_distributed(torch.device("cpu"))
    batch = synthetic.make_batch(torch.float32)
    mine = batch[:7] if dist.get_rank() == 0 else batch[7:]
    engine = synthetic.make_engine(folder, precision="fp32", fsdp={"full_determinism": True})
    for _ in range(3):
        engine.train_step(mine, synthetic.SyntheticLoss(), micro=synthetic.CUTS["three"])
    weights = synthetic.weights(engine)
    if dist.get_rank() == 0:
        torch.save(weights, results)
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
