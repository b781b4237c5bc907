"""Output head and embedding over a vocabulary that three ranks share, compared with a slow reference."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tandem.models.collectives import CollectiveMeter
from tandem.models.heads import tiled
from tandem.models.heads.exact import kl_divergence, sum_pi_squared
from tandem.models.logits import for_bias, with_bias
from tandem.models.tensor_group import TensorGroup, local
from tandem.models.tensor_parallel import Split
from tests.engines.train.on_ranks import on_ranks

ROWS, FEATURES, PADDING = 37, 12, 13
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
RULES = ((1.0, 0.0), (0.6, 20.0))  # temperature and softcap
CASES = list(itertools.product((29, 30), (1, 1 << 20), RULES, DTYPES, ((1, 1), (1, 0), (0, 1))))


def inputs(vocabulary, dtype):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, FEATURES, generator=draw, dtype=torch.float64).to(dtype) for n in (ROWS, vocabulary)
    )
    targets = torch.randint(0, vocabulary, (ROWS,), generator=draw)
    mix = torch.randn(2, ROWS, generator=draw, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=draw, dtype=torch.float64).to(dtype)
    return 3 * hidden, weight, bias, targets, mix


def head(group, vocabulary, tile_bytes, rule, dtype, asked):
    tiled.TILE_BYTES["cpu"], tiled._LEAST_TILE = tile_bytes, 3
    hidden, weight, bias, targets, mix = inputs(vocabulary, dtype)
    layer = split_layer(group, weight, bias)
    wide = with_bias(layer.weight, layer.bias)
    options = {"temperature": rule[0], "softcap": rule[1], "with_entropy": bool(asked[1])}
    states = for_bias(hidden.requires_grad_(), wide)
    found = tiled.token_log_probs(states, wide, targets, group=group, **options)
    sum((value * m).sum() for value, m, use in zip(found, mix, asked, strict=True) if use).backward()
    gradients = hidden.grad, layer.weight.grad.full_tensor(), layer.bias.grad.full_tensor()
    return [value.detach() for value in found if value is not None], *gradients


def split_layer(group, weight, bias):
    layer = nn.Linear(*weight.T.shape, dtype=weight.dtype)
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    Split(group).place(layer, weight=Shard(0), bias=Shard(0))
    return layer


def exact(group, vocabulary):
    """Return the KL to the same head without its bias, the sum of squares, and the KL's gradients."""
    hidden, weight, bias, _, mix = inputs(vocabulary, torch.float64)
    layer = split_layer(group, weight, bias)
    part, other = (
        local(with_bias(*pair)) for pair in ((layer.weight, layer.bias), (layer.weight, 0 * layer.bias))
    )
    states = for_bias(hidden.requires_grad_(), part)
    options = {"temperature": 0.6, "softcap": 20.0, "group": group}
    divergence = kl_divergence(states, part, states.detach(), other.detach(), **options)
    (divergence * mix[0]).sum().backward()
    gradients = hidden.grad, layer.weight.grad.full_tensor(), layer.bias.grad.full_tensor()
    return divergence.detach(), sum_pi_squared(states, part, **options), *gradients


def embedding(group, vocabulary):
    _, weight, _, ids, _ = inputs(vocabulary, torch.float64)
    module = nn.Embedding(vocabulary, FEATURES, PADDING, _weight=weight.clone())
    Split(group).vocabulary(module)
    out = module(ids)
    (out * torch.arange(out.numel()).view_as(out)).sum().backward()
    return out.detach(), module.weight.grad.full_tensor()


def job():
    group = TensorGroup(init_device_mesh("cpu", (dist.get_world_size(),)), CollectiveMeter())
    heads = {case: head(group, *case) for case in CASES}
    more = {"exact": exact, "embedding": embedding}
    return {"head": heads} | {
        name: {vocabulary: made(group, vocabulary) for vocabulary in (29, 30)} for name, made in more.items()
    }


TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 5e-2}


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(job, ranks=3)


def log_softmax_of(hidden, weight, bias, temperature, softcap):
    logits = F.linear(hidden, weight, bias) / temperature
    return torch.log_softmax(softcap * torch.tanh(logits / softcap) if softcap else logits, -1)


def test_exact_quantities(ranks):
    for vocabulary in (29, 30):
        hidden, weight, bias, _, mix = inputs(vocabulary, torch.float64)
        wide = [t.requires_grad_() for t in (hidden, weight, bias)]
        log_p = log_softmax_of(*wide, 0.6, 20.0)
        log_q = log_softmax_of(hidden, weight, None, 0.6, 20.0).detach()
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
        gradients = torch.autograd.grad((divergence * mix[0]).sum(), wide)
        for record in ranks:
            wanted = divergence.detach(), log_p.detach().exp().square().sum(-1), *gradients
            torch.testing.assert_close(record["exact"][vocabulary], wanted, rtol=1e-10, atol=1e-11)


def test_log_probs_entropies_and_gradients(ranks):
    for case in CASES:
        vocabulary, _, (temperature, softcap), dtype, asked = case
        hidden, weight, bias, targets, mix = inputs(vocabulary, dtype)
        wide = [t.double().requires_grad_() for t in (hidden, weight, bias)]
        log_p = log_softmax_of(*wide, temperature, softcap)
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
    for case, (values, hidden, *_) in ranks[0]["head"].items():
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(values, other["head"][case][0], strict=True)), case
            assert torch.equal(hidden, other["head"][case][1]), case


def test_the_embedding_and_its_padding(ranks):
    for record in ranks:
        for vocabulary, (out, gradient) in record["embedding"].items():
            _, weight, _, ids, _ = inputs(vocabulary, torch.float64)
            assert PADDING in ids
            weight.requires_grad_()
            expected = F.embedding(ids, weight, PADDING)
            (expected * torch.arange(expected.numel()).view_as(expected)).sum().backward()
            assert torch.equal(out, expected)
            assert torch.equal(gradient, weight.grad)
            assert not gradient[PADDING].any()
