"""A job for two ranks that computes the exact KL to a reference policy.

The policy's layers are split, its tokens are shared, or neither. Each data-parallel rank takes its share of
the rows. Arguments: FOLDER of two models, RESULTS file to write.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import synthetic
import torch
import torch.distributed as dist

from tandem.engines.train.base import REFERENCE
from tandem.models.parallel import init_distributed, leave_distributed
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto

DIVISIONS = {
    "sharded": {},
    "tensor": {"fsdp": {"tensor_parallel_size": 2}},
    "tokens": {"sequence_parallel": 2},
}
OUTPUTS = ("ref_kl", "sum_pi_squared")


@dataclass
class ExactLoss:
    """The mean of the exact KL."""

    outputs: frozenset = frozenset({"log_probs", "ref_kl"})
    columns: frozenset = frozenset({"response_mask"})

    def __call__(self, out, columns, offsets, counts):
        return (out["ref_kl"] * columns["response_mask"]).sum() / counts.tokens, Metrics()


def compared(folder, **options):
    """Take one update with the KL as loss.

    Return this rank's share, the outputs of its rows before the update, and all weights after it.
    """
    policy = synthetic.make_engine(folder / "policy", **options)
    reference = synthetic.make_engine(folder / "reference", frozen=True, **options)
    batch = synthetic.make_batch()
    batch = batch.chunk(policy.share.size)[policy.share.rank].select(["tokens", "response_mask"], ())
    micro = synthetic.CUTS["three"]
    hidden = reference.forward(batch, outputs=frozenset({"hidden"}), micro=micro).ragged("hidden")
    policy.hold_reference_head(reference.output_head())
    batch = batch.union(DataProto({REFERENCE: hidden}))
    out = policy.forward(batch, outputs=frozenset(OUTPUTS), micro=micro)
    policy.train_step(batch, ExactLoss(), micro=micro)
    return policy.share, {name: out.ragged(name).values for name in OUTPUTS}, synthetic.weights(policy)


def main():
    folder, results = map(Path, sys.argv[1:])
    init_distributed(torch.device("cpu"))
    record = {}
    for name, options in DIVISIONS.items():
        share, out, weights = compared(folder, **options)
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (share, out))
        led = [found for each, found in sorted(parts, key=lambda part: part[0].rank) if each.leads]
        record[name] = {key: torch.cat([found[key] for found in led]) for key in OUTPUTS}, weights
    if dist.get_rank() == 0:
        torch.save(record, results)
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
