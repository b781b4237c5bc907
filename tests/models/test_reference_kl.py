"""The policy's further outputs, compared with transformers' forward in float64."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engines.train.base import REFERENCE
from tandem.engines.train.microbatch import assemble
from tandem.errors import EngineError
from tandem.models.loading import load_policy
from tandem.models.policy import PolicyModel
from tandem.protocol import DataProto, Ragged

CPU = torch.device("cpu")
TEMPERATURE = 0.7
LENGTHS = [5, 1, 12, 9]


def make_batch():
    draw = torch.Generator().manual_seed(4)
    tokens = Ragged.from_list([torch.randint(0, 31, (length,), generator=draw) for length in LENGTHS])
    mask = (tokens.positions() >= 2) & (torch.rand(len(tokens.values), generator=draw) < 0.8)
    return DataProto({"tokens": tokens, "response_mask": tokens.with_values(mask)})


def log_softmax(model, tokens):
    """Return (T, V) log-probs of each sequence alone, before each token; zero before the first."""
    rows = [torch.log_softmax(model(row[None]).logits[0] / TEMPERATURE, -1) for row in tokens]
    return torch.cat([torch.cat([torch.zeros_like(row[:1]), row[:-1]]) for row in rows])


def moved(model):
    """Return the same model with other weights, as a reference that the policy has moved away from."""
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    return model


@pytest.mark.equation("kl/full")
def test_kl_to_the_reference_and_collisions(model_folder):
    batch = make_batch()
    tokens, mask = batch.ragged("tokens"), batch.ragged("response_mask").values
    policy = PolicyModel(load_policy(model_folder, dtype=torch.float64), temperature=TEMPERATURE)
    reference = PolicyModel(moved(load_policy(model_folder, dtype=torch.float64)), temperature=TEMPERATURE)
    with torch.no_grad():
        inputs = assemble(batch, [0, 1, 2, 3], frozenset(), device=CPU).inputs
        hidden = reference(inputs, frozenset({"hidden"}))["hidden"]
    assert hidden.shape == (sum(LENGTHS), 32) and not hidden[~mask].any()
    policy.reference_head = reference.model.get_output_embeddings().weight.detach()
    batch.batch[REFERENCE] = tokens.with_values(hidden)
    inputs = assemble(batch, [0, 1, 2, 3], frozenset(), device=CPU).inputs
    out = policy(inputs, frozenset({"log_probs", "ref_kl", "sum_pi_squared"}))

    plain = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float64, attn_implementation="sdpa"
    )
    other = moved(
        AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float64, attn_implementation="sdpa"
        ).eval()
    )
    log_p, log_q = log_softmax(plain, tokens), log_softmax(other, tokens).detach()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1) * mask
    assert kl.detach().max() > 1e-2
    torch.testing.assert_close(out["ref_kl"], kl, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        out["sum_pi_squared"], (log_p.exp().square().sum(-1) * mask).detach(), rtol=0, atol=1e-12
    )
    mix = torch.randn(len(mask), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (out["ref_kl"] * mix).sum().backward()
    (kl * mix).sum().backward()
    expected = dict(plain.named_parameters())
    for name, parameter in policy.named_parameters():
        want = expected[policy.hf_name(name)].grad
        assert (parameter.grad - want).norm() <= 1e-10 * want.norm(), name


def test_a_policy_that_lacks_the_references_part_says_which(qwen2_folder):
    policy = PolicyModel(load_policy(qwen2_folder))
    inputs = assemble(make_batch(), [0, 2], frozenset(), device=CPU).inputs
    with pytest.raises(EngineError, match="output head"):
        policy(inputs, frozenset({"ref_kl"}))
    policy.reference_head = policy.model.get_output_embeddings().weight.detach()
    with pytest.raises(EngineError, match="hidden states"):
        policy(inputs, frozenset({"ref_kl"}))
