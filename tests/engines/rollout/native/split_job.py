"""A job that runs on ranks. It reads CASES (models, requests, options) and writes RESULTS.

Every rank writes its samples.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native import memory
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.split import LayerSplit
from tandem.errors import EngineError
from tandem.protocol import Request, SamplingParams


def short_of_memory(split):
    """Return the message of a rank when the last rank has no memory for the cache."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    config.num_key_value_heads = 2
    engine = NativeEngine(device=torch.device("cpu"), max_length=128, split=split)
    engine.update_weights(SharedModule(Qwen2ForCausalLM(config).eval()), 0)
    if split.rank == split.size - 1:
        memory.host_free = lambda: 0
    try:
        generate(engine, [Request("a", 0, np.arange(10), SamplingParams(max_tokens=5))])
    except EngineError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    cases, results = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    split = LayerSplit(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    record = {}
    for name, (model, requests, options) in torch.load(cases, weights_only=False).items():
        engine = NativeEngine(device=torch.device("cpu"), max_length=128, split=split, **options)
        engine.update_weights(SharedModule(model), 0)
        samples = generate(engine, requests)
        layer = engine._steps.runner.layers[0]
        record[name] = [(s.id, s.token_ids, s.log_probs, s.finish_reason) for s in samples], layer
    record["short of memory"] = short_of_memory(split)
    torch.save(record, results / f"rank_{dist.get_rank()}.pt")
    dist.destroy_process_group()
