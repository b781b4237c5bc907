"""A job that trains under every division of the ranks; each rank takes its share of the rows.

Arguments: FOLDER of the model, RESULTS file to write.
"""

import sys
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist

from tandem.models.parallel import leave_distributed

STEPS = 3


def grids(world):
    """Return pairs: sequence-parallel size, and number of ranks that share one copy of the weights."""
    if world == 2:
        return [(1, 2), (2, 2), (2, 1), (1, 1)]
    return [(1, 4), (2, 2), (4, 4), (2, 4)]


def my_rows(engine, batch):
    """Return this rank's rows. Shares are uneven: of two or more, the last has at most one row."""
    ends = [len(batch) * (i + 1) // engine.share.size for i in range(engine.share.size)]
    if len(ends) > 1:
        ends[-2] = len(batch) - 1
    begin = ends[engine.share.rank - 1] if engine.share.rank else 0
    return batch[begin : ends[engine.share.rank]]


def train(folder, precision, sequence, copy, kind="policy"):
    dtype = torch.float64 if precision == "fp64" else torch.float32
    # Gradients are reduced over copies once in both cases.
    sync = "each" if 0 < copy < dist.get_world_size() else "once"
    fsdp = {"fsdp_size": copy, "gradient_sync": sync}
    engine = synthetic.make_engine(
        folder, precision=precision, fsdp=fsdp, sequence_parallel=sequence, kind=kind
    )
    loss = synthetic.ValueLoss() if kind == "value" else synthetic.SyntheticLoss("seq-mean-token-mean")
    batch, micro = synthetic.make_batch(dtype), synthetic.CUTS["three"]
    rows = my_rows(engine, batch)
    outputs = frozenset({"values"}) if kind == "value" else frozenset({"log_probs", "entropy"})
    metrics = [engine.train_step(rows, loss, micro=micro).to_floats() for _ in range(STEPS)]
    last = engine.forward(rows, outputs=outputs, micro=micro)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (engine.share, {name: last.ragged(name).values for name in outputs}))
    led = [found for share, found in sorted(parts, key=lambda part: part[0].rank) if share.leads]
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, engine.digest())
    with engine.unsharded() as module:
        embedding = module.get_input_embeddings().weight.detach().clone()
    return {
        "forward": {name: torch.cat([found[name] for found in led]) for name in outputs},
        "metrics": metrics,
        "weights": synthetic.weights(engine),
        "digests": digests,
        "embedding": embedding,
        "collectives": engine.take_collectives(),
    }


def main():
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    record = {}
    for sequence, copy in grids(dist.get_world_size()):
        record["fp64", "policy", sequence, copy] = train(folder, "fp64", sequence, copy)
    record["fp32", "policy", 2, -1] = train(folder, "fp32", 2, -1)
    record["fp64", "value", 2, -1] = train(folder, "fp64", 2, -1, "value")
    if dist.get_rank() == 0:
        torch.save(record, results)


if __name__ == "__main__":
    from tandem.models.parallel import init_distributed

    init_distributed(torch.device("cpu"))
    main()
    leave_distributed(together=True)
