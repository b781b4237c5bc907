"""A job that runs on ranks. It reads CASES (models, requests, options) and writes RESULTS.

Every rank writes its samples.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.native import memory
from tandem.engines.rollout.native.split import LayerSplit
from tandem.errors import EngineError
from tests.engines.rollout.case import native

if __name__ == "__main__":
    cases, results = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    split = LayerSplit(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    record = {}
    for name, (model, requests, options) in torch.load(cases, weights_only=False).items():
        engine = native(model, split=split, **options)
        if name == "short of memory" and split.rank == split.size - 1:
            memory.host_free = lambda: 0
        try:
            samples = generate(engine, requests)
            record[name] = samples, engine._steps.runner.layers[0]
        except EngineError as error:
            record[name] = str(error)
    torch.save(record, results / f"rank_{dist.get_rank()}.pt")
    dist.destroy_process_group()
