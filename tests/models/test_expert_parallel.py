"""Experts that two ranks divide compute what whole experts compute, and what they exchange is counted."""

import pytest
import torch
import torch.distributed as dist
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tandem.models.collectives import CollectiveMeter
from tandem.models.expert_parallel import ExpertGroup
from tandem.models.experts import EXPERTS
from tandem.models.parallel import Grid
from tests.engines.train.on_ranks import on_ranks
from tests.models.small import CPU

E, K, D, N = 6, 2, 8, 5
SIZES = {"hidden_size": D, "intermediate_size": 4, "moe_intermediate_size": 4, "num_local_experts": E}
KINDS = {"plain": (Qwen3MoeConfig, Qwen3MoeExperts), "with biases": (GptOssConfig, GptOssExperts)}
CHOICES = {"of all experts": range(E), "of one rank's experts": range(E // 2)}


def experts_of(kind):
    config_class, experts_class = KINDS[kind]
    config = config_class(**SIZES)
    config._experts_implementation = EXPERTS
    module = experts_class(config).double()
    draw = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw))
    return module


def computed(module, chosen_NK, rank):
    """Return the output, and the gradients of the hidden states, of the weights and of each parameter."""
    draw = torch.Generator().manual_seed(2 + rank)
    hidden_ND, weights_NK = (
        torch.randn(N, width, generator=draw, dtype=torch.float64).requires_grad_() for width in (D, K)
    )
    out_ND = module(hidden_ND, chosen_NK, weights_NK)
    (out_ND * torch.arange(N * D).view(N, D).sin()).sum().backward()
    return (out_ND.detach(), hidden_ND.grad, weights_NK.grad), {
        n: p.grad for n, p in module.named_parameters()
    }


def compare(kind, allowed):
    rank, meter = dist.get_rank(), CollectiveMeter()
    grid = Grid.over_all_ranks(CPU, experts=2)
    whole, divided = experts_of(kind), experts_of(kind)
    ExpertGroup(grid.experts, meter).divide(divided)
    draw = torch.Generator().manual_seed(7 + rank)
    chosen_NK = torch.stack([torch.randperm(len(allowed), generator=draw)[:K] for _ in range(N)])
    wanted, found = computed(whole, chosen_NK, rank), computed(divided, chosen_NK, rank)
    for gradient in wanted[1].values():
        dist.all_reduce(gradient)
    here = chosen_NK // (E // 2) == rank
    counts = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(counts, torch.tensor([int(here.sum()), int((~here).sum())]))
    return {
        "outputs": list(zip(found[0], wanted[0], strict=True)),
        "gradients": [(found[1][name].full_tensor(), value) for name, value in wanted[1].items()],
        "parts": {part.to_local().shape[0] for part in found[1].values()},
        "bytes": meter.take()[1],
        "pairs": [int(counts[rank][1]), int(counts[1 - rank][1])],
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", CHOICES)
def test_divided_experts_compute_and_learn_like_whole_ones(kind, choice):
    for found in on_ranks(compare, kind, CHOICES[choice]):
        for got, wanted in (*found["outputs"], *found["gradients"]):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
        assert found["parts"] == {E // 2}
        # The counts once; hidden states and outputs once, and their gradients, of the pairs of two ranks.
        assert found["bytes"] == E // 2 * 8 + 2 * sum(found["pairs"]) * D * 8
