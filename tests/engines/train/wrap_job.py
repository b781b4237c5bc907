"""A job for two ranks that trains with each wrap policy, with recomputation of layers and without.

Arguments: FOLDER of the model, RESULTS file to write, CASES (core or all).
"""

import itertools
import sys
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist

from tandem.models.parallel import init_distributed, leave_distributed

LAYERS = 5
SHAPE = {"num_hidden_layers": LAYERS, "tie_word_embeddings": False}
LAYER = 32 * (32 + 1) + 2 * 16 * (32 + 1) + 32 * 32 + 3 * 32 * 48 + 2 * 32  # numbers in a layer
MLP = 3 * 32 * 48

NAMES, LEAST = "transformer_layer_cls_to_wrap", "min_num_params"
# The policy, and the number of units it makes besides the root.
POLICIES = {
    "layers": ({}, LAYERS),
    "exactly a layer": ({LEAST: LAYER}, LAYERS),
    "more than a layer": ({LEAST: LAYER + 1}, 2),
    "as many as all": ({LEAST: LAYERS * LAYER}, 1),
    "more than all": ({LEAST: LAYERS * LAYER + 1}, 0),
    "layers and embedding": ({NAMES: ("Qwen2DecoderLayer", "Embedding")}, LAYERS + 1),
    "embedding with a layer": ({NAMES: ("Qwen2DecoderLayer", "Embedding"), LEAST: LAYER}, LAYERS),
    "within layers": ({NAMES: ("Qwen2Attention", "Qwen2MLP")}, 2 * LAYERS),
    "inside each other": ({NAMES: ("Qwen2DecoderLayer", "Qwen2MLP")}, 2 * LAYERS),
    "shared across layers": ({NAMES: ("Qwen2MLP",), LEAST: 2 * MLP}, 2),
    "linear maps": ({NAMES: ("Linear",)}, 7 * LAYERS),
    "the decoder": ({NAMES: ("Qwen2Model", "Qwen2DecoderLayer")}, LAYERS + 1),
}
KEPT = {"again": {"gradient_checkpointing_mode": "full"}, "kept": {"enable_gradient_checkpointing": False}}
CORE = set(zip(POLICIES, itertools.cycle(KEPT), strict=False))
STEPS = 2


def engine_with(folder, policy, kept, **fsdp):
    return synthetic.make_engine(folder, model=KEPT[kept], fsdp={"wrap_policy": policy, **fsdp})


def trained(engine, batch):
    """Take some steps, and return the weights and log-probs after them."""
    loss, micro = synthetic.SyntheticLoss(), synthetic.CUTS["three"]
    for _ in range(STEPS):
        engine.train_step(batch, loss, micro=micro)
    out = engine.forward(batch, outputs=frozenset({"log_probs"}), micro=micro)
    return synthetic.weights(engine), out.ragged("log_probs").values


def lent(engine):
    """Return the logits of a rollout that borrows the module."""
    with engine.unsharded() as module, torch.no_grad():
        module.set_attn_implementation("sdpa")
        logits = module(torch.arange(9)[None], use_cache=False).logits
        module.set_attn_implementation("tandem_packed")
    return logits


def sharded_again(engine):
    return all(parameter.to_local().numel() < parameter.numel() for parameter in engine.module.parameters())


def main():
    folder, results, cases = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    init_distributed(torch.device("cpu"))
    batch = synthetic.make_batch()
    mine = batch[:7] if dist.get_rank() == 0 else batch[7:]
    record = {}
    for name, (policy, _) in POLICIES.items():
        for kept in KEPT:
            if cases == "core" and (name, kept) not in CORE:
                continue
            engine = engine_with(folder, policy, kept, forward_prefetch=kept == "kept")
            weights, log_probs = trained(engine, mine)
            parts = [None, None]
            dist.all_gather_object(parts, log_probs)
            record[name, kept] = {
                "weights": weights,
                "log_probs": torch.cat(parts),
                "units": len(engine._units) - 1,
                "lent": lent(engine),
                "sharded again": sharded_again(engine),
            }
    if dist.get_rank() == 0:
        torch.save(record, results)
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
