"""Output head and embedding over a vocabulary that three ranks share, compared with a slow reference."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import split_vocabulary_job as job

from tests.support.ranks import run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    results = tmp_path_factory.mktemp("vocabulary") / "record.pt"
    run_ranks(job.__file__, results, ranks=3)
    return torch.load(results, weights_only=False)


def test_log_probs_entropies_and_gradients(ranks):
    for case in job.CASES:
        vocabulary, _, temperature, dtype, asked = case
        hidden, weight, targets, mix = job.inputs(vocabulary, dtype)
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
            _, weight, ids, _ = job.inputs(vocabulary, torch.float64)
            assert job.PADDING in ids
            weight.requires_grad_()
            expected = F.embedding(ids, weight, job.PADDING)
            (expected * torch.arange(expected.numel()).view_as(expected)).sum().backward()
            assert torch.equal(out, expected)
            assert torch.equal(gradient, weight.grad)
            assert not gradient[job.PADDING].any()
