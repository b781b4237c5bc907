"""Output head and embedding over a vocabulary that three ranks share, compared with a slow reference."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tandem.models.collectives import CollectiveMeter
from tandem.models.heads import tiled
from tandem.models.tensor_group import TensorGroup
from tandem.models.tensor_parallel import Split
from tests.engines.train.on_ranks import on_ranks

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


def job():
    group = TensorGroup(init_device_mesh("cpu", (dist.get_world_size(),)), CollectiveMeter())
    heads = {case: head(group, *case) for case in CASES}
    return {"head": heads, "embedding": {vocabulary: embedding(group, vocabulary) for vocabulary in (29, 30)}}


TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(job, ranks=3)


def test_log_probs_entropies_and_gradients(ranks):
    for case in CASES:
        vocabulary, _, temperature, dtype, asked = case
        hidden, weight, targets, mix = inputs(vocabulary, dtype)
        wide = [t.double().requires_grad_() for t in (hidden, weight)]
        log_p = torch.log_softmax(wide[0] @ wide[1].T / temperature, -1)
        expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        loss = sum((e * m).sum() for e, m, use in zip(expected, mix, asked, strict=True) if use)
        gradients = torch.autograd.grad(loss, wide)
        for values, *found in (record["head"][case] for record in ranks):
            assert len(values) == 1 + asked[1]
            for got, want in zip(values, expected, strict=False):
                assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                assert (got - want).abs().max() <= TOLERANCE[dtype] * (1 + want.abs().max()), case
            for got, want in zip(found, gradients, strict=True):
                assert (got.double() - want).norm() <= TOLERANCE[dtype] * want.norm(), case


def test_every_rank_has_the_same_bits(ranks):
    for case, (values, hidden, _) in ranks[0]["head"].items():
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(values, other["head"][case][0], strict=True)), case
            assert torch.equal(hidden, other["head"][case][1]), case


def test_the_embedding_and_its_padding(ranks):
    for record in ranks:
        for vocabulary, (out, gradient) in record["embedding"].items():
            _, weight, ids, _ = inputs(vocabulary, torch.float64)
            assert PADDING in ids
            weight.requires_grad_()
            expected = F.embedding(ids, weight, PADDING)
            (expected * torch.arange(expected.numel()).view_as(expected)).sum().backward()
            assert torch.equal(out, expected)
            assert torch.equal(gradient, weight.grad)
            assert not gradient[PADDING].any()
