"""A job for two ranks that does what `mesh_job` does, and also resumes from checkpoints.

Arguments: RESULTS folder, FOLDER of a model, SAVED checkpoints of one rank.
"""

import sys
from pathlib import Path

import mesh_job
import optimizer_case
import synthetic
import torch
import torch.distributed as dist

from tandem.models.parallel import init_distributed, leave_distributed


def resumed(folder, saved, results):
    """Return, for each optimizer, three sets of weights.

    They are the weights after two steps in a row; after a step, a checkpoint and a step; and after one rank's
    checkpoint and a step.
    """
    batch = synthetic.make_batch()
    batch = batch[:7] if dist.get_rank() == 0 else batch[7:]
    micro, found = synthetic.CUTS["three"], {}
    for choice in optimizer_case.STATES:
        options = optimizer_case.CHOICES[choice]
        engines = [synthetic.make_engine(folder, optim=options) for _ in range(3)]
        for engine in engines[:2]:
            engine.train_step(batch, synthetic.SyntheticLoss(), micro=micro)
        engines[0].save(results / choice)
        engines[1].train_step(batch, synthetic.SyntheticLoss(), micro=micro)
        found[choice] = [synthetic.weights(engines[1])]
        for path in (results / choice, saved / choice):
            engines[2].load(path)
            engines[2].train_step(batch, synthetic.SyntheticLoss(), micro=micro)
            found[choice].append(synthetic.weights(engines[2]))
    return found


def main():
    results, folder, saved = (Path(argument) for argument in sys.argv[1:])
    init_distributed(torch.device("cpu"))
    record = mesh_job.record() | {"resumed": resumed(folder, saved, results)}
    if dist.get_rank() == 0:
        torch.save(record, results / "record.pt")
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
