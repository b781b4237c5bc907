"""Run by torchrun: CASES (models, requests, options), RESULTS to write. Every rank writes its samples."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.tensor_parallel import TensorParallel

if __name__ == "__main__":
    cases, results = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    split = TensorParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    record = {}
    for name, (model, requests, options) in torch.load(cases, weights_only=False).items():
        engine = NativeEngine(device=torch.device("cpu"), max_length=128, split=split, **options)
        engine.update_weights(SharedModule(model), 0)
        samples = generate(engine, requests)
        layer = engine._runner.layers[0]
        record[name] = [(s.id, s.token_ids, s.log_probs, s.finish_reason) for s in samples], layer
    torch.save(record, results / f"rank_{dist.get_rank()}.pt")
    dist.destroy_process_group()
