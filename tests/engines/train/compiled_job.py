"""A job for two ranks that computes gradients of compiled layers.

The weights are sharded, and in one case the ranks share the tokens of each micro-batch. Arguments: FOLDER of
the model, RESULTS file to write.
"""

import sys
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from tandem.models.parallel import init_distributed, leave_distributed

COMPILED = {"use_torch_compile": True}


def precise_norm(self, hidden_states):
    """Replace the model's own norm, which rounds to fp32 at any precision."""
    mean = hidden_states.square().mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon))


def graphs():
    """Return the number of graphs that were compiled in this process."""
    return counters["stats"]["unique_graphs"]


def main():
    folder, results = (Path(argument) for argument in sys.argv[1:])
    init_distributed(torch.device("cpu"))
    Qwen2RMSNorm.forward = precise_norm
    batch, loss, micro = synthetic.make_batch(), synthetic.SyntheticLoss(), synthetic.CUTS["three"]
    mine = batch[:7] if dist.get_rank() == 0 else batch[7:]
    record = {}
    for sequence, rows in ((1, mine), (2, batch)):
        fsdp = COMPILED | {"forward_prefetch": sequence == 2}
        engine = synthetic.make_engine(folder, fsdp=fsdp, sequence_parallel=sequence)
        gradients, metrics = synthetic.gradients(engine, rows, loss, micro)
        engine.train_step(rows, loss, micro=micro)
        record[sequence] = gradients, metrics, synthetic.weights(engine), graphs()
    if dist.get_rank() == 0:
        torch.save(record, results)
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
