"""A job for several ranks that writes RESULTS, its only argument.

It runs the output head and the embedding over a shared vocabulary, with the same inputs on every rank. It
stores the outputs and gradients of each case.
"""

import itertools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tandem.models.collectives import CollectiveMeter
from tandem.models.heads import tiled
from tandem.models.parallel import init_distributed, leave_distributed
from tandem.models.tensor_group import TensorGroup
from tandem.models.tensor_parallel import Split

ROWS, FEATURES, PADDING = 37, 12, 13
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
CASES = list(itertools.product((29, 30), (1, 1 << 20), (1.0, 0.6), DTYPES, ((1, 1), (1, 0), (0, 1))))


def inputs(vocabulary, dtype):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, FEATURES, generator=draw, dtype=torch.float64).to(dtype) for n in (ROWS, vocabulary)
    )
    targets = torch.randint(0, vocabulary, (ROWS,), generator=draw)
    return 3 * hidden, weight, targets, torch.randn(2, ROWS, generator=draw, dtype=torch.float64)


def head(group, vocabulary, tile_bytes, temperature, dtype, asked):
    tiled.TILE_BYTES["cpu"], tiled._LEAST_TILE = tile_bytes, 3
    hidden, weight, targets, mix = inputs(vocabulary, dtype)
    part = weight.chunk(group.size)[group.rank].clone()
    split = DTensor.from_local(part, group.mesh, [Shard(0)], shape=weight.shape, stride=weight.stride())
    hidden, split = hidden.requires_grad_(), nn.Parameter(split)
    options = {"temperature": temperature, "with_entropy": bool(asked[1])}
    found = tiled.token_log_probs(hidden, split, targets, group=group, **options)
    sum((value * m).sum() for value, m, use in zip(found, mix, asked, strict=True) if use).backward()
    return [value.detach() for value in found if value is not None], hidden.grad, split.grad.full_tensor()


def embedding(group, vocabulary):
    _, weight, ids, _ = inputs(vocabulary, torch.float64)
    module = nn.Embedding(vocabulary, FEATURES, PADDING, _weight=weight.clone())
    Split(group).vocabulary(module)
    out = module(ids)
    (out * torch.arange(out.numel()).view_as(out)).sum().backward()
    return out.detach(), module.weight.grad.full_tensor()


def main():
    init_distributed(torch.device("cpu"))
    group = TensorGroup(init_device_mesh("cpu", (dist.get_world_size(),)), CollectiveMeter())
    record = {
        "head": {case: head(group, *case) for case in CASES},
        "embedding": {vocabulary: embedding(group, vocabulary) for vocabulary in (29, 30)},
    }
    parts = [None] * group.size
    dist.all_gather_object(parts, record)
    if group.rank == 0:
        torch.save(parts, sys.argv[1])
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
