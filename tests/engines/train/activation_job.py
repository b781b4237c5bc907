"""A job for two ranks that computes gradients over sharded layers for each way to keep activations.

Arguments: FOLDER of the model, RESULTS file to write, precisions.
"""

import sys
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist

from tandem.models.activation_offload import SameStream
from tandem.models.parallel import leave_distributed

MODES = {
    "none": {"enable_gradient_checkpointing": False},
    "full": {"gradient_checkpointing_mode": "full"},
    "first": {"gradient_checkpointing_mode": "first", "gradient_checkpointing_layers": 1},
    "every": {"gradient_checkpointing_mode": "every", "gradient_checkpointing_layers": 2},
    "ops": {"gradient_checkpointing_mode": "ops"},
}
OFFLOADS = {"none": {}, "copied": {"enable_activation_offload": True}}


def engine_with(folder, mode, offload, precision="fp64", **options):
    """Make an engine. With "copied", saved activations really are copied within host memory."""
    model = MODES[mode] | OFFLOADS[offload]
    engine = synthetic.make_engine(folder, precision=precision, model=model, **options)
    if engine.activation_offload is not None:
        engine.activation_offload.lane = SameStream()
        engine.activation_offload.min_bytes = 0
    return engine


def batch_of(precision):
    return synthetic.make_batch(torch.float64 if precision == "fp64" else torch.float32)


def main():
    folder, results = (Path(argument) for argument in sys.argv[1:3])
    loss, micro = synthetic.SyntheticLoss(), synthetic.CUTS["three"]
    record = {}
    for precision in sys.argv[3:]:
        batch = batch_of(precision)
        for mode in MODES:
            for offload in OFFLOADS:
                engine = engine_with(folder, mode, offload, precision)
                mine = batch[:7] if dist.get_rank() == 0 else batch[7:]
                engine.take_collectives()
                gradients, metrics = synthetic.gradients(engine, mine, loss, micro)
                record[precision, mode, offload] = gradients, metrics, engine.take_collectives()[1]
    if dist.get_rank() == 0:
        torch.save(record, results)
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
