"""A job for two ranks that moves parameters and optimizer state to the host and back between updates.

It also runs the same updates with an engine whose state stays. Arguments: FOLDER of a model, RESULTS folder.
"""

import sys
import tempfile
from pathlib import Path

import optimizer_case
import synthetic
import torch
import torch.distributed as dist

from tandem.models.parallel import init_distributed, leave_distributed

CHOICES = ("adamw", "foreach", "muon", "adamw_cpu")
ROUNDS = 3


def rounds(folder, choice, batch):
    """Return what three rounds of updates give with moved state and with state that stays.

    The result has the weights after each update, addresses of the host memory in each round, and weights
    loaded from a checkpoint that was written while the whole state was on the host.
    """
    optim, micro = optimizer_case.CHOICES[choice], synthetic.CUTS["three"]
    moved, stays, resumed = (synthetic.make_engine(folder, optim=optim) for _ in range(3))
    found = {"moved": [], "stayed": [], "memory": []}
    state = moved._state
    state.offload(parameters=True, optimizer=True)
    for _ in range(ROUNDS):
        state.onload(parameters=True, optimizer=False)  # log-probs need only the parameters
        moved.forward(batch, outputs=frozenset({"log_probs"}), micro=micro)
        state.offload(parameters=True, optimizer=True)
        state.onload(parameters=True, optimizer=True)
        for engine in (moved, stays):
            engine.train_step(batch, synthetic.SyntheticLoss(), micro=micro)
        state.offload(parameters=True, optimizer=True)
        state.offload(parameters=True, optimizer=True)
        found["moved"].append(synthetic.weights(moved))
        found["stayed"].append(synthetic.weights(stays))
        stores = (state._parameters_host, state._optimizer_host)
        found["memory"].append([buffer.data_ptr() for store in stores for buffer in store.buffers])
    with tempfile.TemporaryDirectory() as path:
        shared = [path]
        dist.broadcast_object_list(shared)
        moved.save(Path(shared[0]))
        resumed.load(Path(shared[0]))
        dist.barrier()
    found["resumed"] = synthetic.weights(resumed)
    return found


def main():
    folder, results = (Path(argument) for argument in sys.argv[1:])
    batch, found = synthetic.make_batch(), {}
    init_distributed(torch.device("cpu"))
    mine = batch[:7] if dist.get_rank() == 0 else batch[7:]
    for choice in CHOICES:
        found[choice] = rounds(folder, choice, mine)
    torch.save(found, results / f"{dist.get_rank()}.pt")
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
