"""A job for two ranks that records what each rank chooses to recompute.

In one case one rank has less memory. The ranks' micro-batches differ in size. The job also compares the bytes
that layers keep with the estimate, for layers that the ranks share. Arguments: FOLDER of a model, RESULTS
folder.
"""

import sys
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist

from tandem.engines.train import recomputation
from tandem.engines.train.base import MicroBatching
from tandem.memory.activations import kept_bytes
from tandem.memory.shapes import model_shape
from tandem.models.parallel import leave_distributed

WIDE = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2}
SHARED = {
    "tensor": {"fsdp": {"tensor_parallel_size": 2}},
    "sequence": {"sequence_parallel": 2},
    "both in halves": {},
}


def kept(folder, **options):
    """Return the bytes that are kept per token and layer, measured and estimated."""
    model = {"enable_gradient_checkpointing": False, "enable_activation_offload": True}
    engine = synthetic.make_engine(folder, precision="fp32", model=model, **options)
    engine.activation_offload.min_bytes = 0
    batch, loss = synthetic.make_batch(torch.float32), synthetic.SyntheticLoss()
    mine = batch if options else batch[:5] if dist.get_rank() == 0 else batch[5:]
    _, metrics = synthetic.gradients(engine, mine, loss, MicroBatching())
    parts = list(engine._micro_batches(mine, loss.columns, MicroBatching()))
    own, tokens = engine._recomputation, sum(len(part.inputs.input_ids) for part in parts)
    layers = synthetic.SHAPE["num_hidden_layers"] - 1  # the last layer is not offloaded
    counted = metrics["activation_offload_bytes"] / layers
    if not options:  # the ranks have different rows, so sum over both
        tokens = torch.tensor(tokens)
        dist.all_reduce(tokens)
    decoder = model_shape(engine.module.decoder.config.to_dict()).decoder
    return counted / int(tokens), kept_bytes(decoder, own._setup(parts), "none")


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
    wide = [None]
    if rank == 0:
        wide = [str(synthetic.save_model(results / "wide", **WIDE))]
    dist.broadcast_object_list(wide)
    shared = {name: kept(Path(wide[0]), **options) for name, options in SHARED.items()}
    found = {"kept": shared, "heard": heard, "modes": modes, "tokens": engine._recomputation._tokens}
    torch.save(found, results / f"{rank}.pt")
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
