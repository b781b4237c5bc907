"""Outputs of policy and value models on packed sequences, compared with transformers and each alone."""

import pytest
import torch
from transformers import AutoModel

from tandem.engines.train.base import REFERENCE
from tandem.engines.train.microbatch import assemble
from tandem.errors import ConfigError, EngineError
from tandem.models.double_precision import double_precision
from tandem.models.loading import load_policy
from tandem.models.logits import with_bias
from tandem.models.packing import pack
from tandem.models.policy import PolicyModel
from tandem.models.value import ValueModel
from tandem.protocol import DataProto, Ragged
from tests.models.small import CONFIGS, CPU, OTHER_HEADS, assert_same_gradients, log_softmax, plain_model

BOTH, VALUES = frozenset({"log_probs", "entropy"}), frozenset({"values"})
LENGTHS = [5, 1, 30, 12, 12, 2, 9]
TEMPERATURE = 0.7


def batch():
    draw = torch.Generator().manual_seed(4)
    tokens = Ragged.from_list([torch.randint(0, 31, (length,), generator=draw) for length in LENGTHS])
    mask = (tokens.positions() >= 2) & (torch.rand(len(tokens.values), generator=draw) < 0.8)
    return tokens, mask, torch.randn(2, len(mask), generator=draw, dtype=torch.float64)


def policy_of(folder):
    return PolicyModel(load_policy(folder, dtype=torch.float64), temperature=TEMPERATURE)


@pytest.mark.parametrize("pad_to_longest", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_each_sequence_alone(model_folder, pad_to_longest, checkpointing):
    check_outputs(model_folder, pad_to_longest, checkpointing)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("model_folder", OTHER_HEADS, indirect=True)
def test_heads_with_a_scale_a_softcap_or_a_bias(model_folder):
    check_outputs(model_folder)


@pytest.fixture
def double():
    with double_precision():
        yield


def check_outputs(model_folder, pad_to_longest=False, checkpointing=False):
    """Compare log-probs, entropies and all gradients with transformers on each sequence alone."""
    tokens, mask, mix = batch()
    policy, plain = policy_of(model_folder), plain_model(model_folder)
    if checkpointing:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    out = policy(pack(tokens, mask, device=CPU, pad_to_longest=pad_to_longest), BOTH)
    log_p = log_softmax(plain, tokens, TEMPERATURE)
    log_probs = log_p.gather(1, tokens.values[:, None])[:, 0] * mask
    entropy = -(log_p.exp() * log_p).sum(-1) * mask
    assert torch.allclose(out["log_probs"], log_probs, atol=1e-12, rtol=0)
    assert torch.allclose(out["entropy"], entropy, atol=1e-12, rtol=0)
    (out["log_probs"] * mix[0] + out["entropy"] * mix[1]).sum().backward()
    (log_probs * mix[0] + entropy * mix[1]).sum().backward()
    assert_same_gradients(policy, plain, 1e-11)


def test_without_padding_no_padding_is_computed(qwen2_folder):
    tokens, mask, _ = batch()
    policy, seen = PolicyModel(load_policy(qwen2_folder)), []
    policy.decoder.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    for pad_to_longest in (False, True):
        policy(pack(tokens, mask, device=CPU, pad_to_longest=pad_to_longest), BOTH)
    assert seen == [sum(max(n - 1, 1) for n in LENGTHS), len(LENGTHS) * (max(LENGTHS) - 1)]


def test_only_what_is_asked_for_and_what_cannot_be(qwen2_folder):
    tokens, mask, _ = batch()
    policy, inputs = PolicyModel(load_policy(qwen2_folder)), assembled(tokens, mask)
    assert set(policy(inputs, frozenset({"log_probs"}))) == {"log_probs"}
    with pytest.raises(ConfigError, match="temperature"):
        PolicyModel(policy.model, temperature=0.0)
    for output, telling in (("values", "values"), ("ref_kl", "output head"), ("ref_kl", "hidden states")):
        with pytest.raises(EngineError, match=telling):
            policy(inputs, frozenset({output}))
        if telling == "output head":
            policy.reference_head = policy.model.get_output_embeddings().weight.detach()


def assembled(tokens, mask, **columns):
    made = DataProto({"tokens": tokens, "response_mask": tokens.with_values(mask), **columns})
    return assemble(made, list(range(len(tokens))), frozenset(), device=CPU).inputs


def moved(model):
    """Return the same model with other weights, as a reference that the policy has moved away from."""
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    return model


@pytest.mark.equation("kl/full")
@pytest.mark.parametrize("model_folder", [*CONFIGS, *OTHER_HEADS], indirect=True)
@pytest.mark.usefixtures("double")
def test_kl_to_the_reference_and_collisions(model_folder):
    tokens, mask, mix = batch()
    policy, reference = policy_of(model_folder), moved(policy_of(model_folder))
    with torch.no_grad():
        hidden = reference(assembled(tokens, mask), frozenset({"hidden"}))["hidden"]
    assert hidden.shape == (sum(LENGTHS), 32) and not hidden[~mask].any()
    head = reference.output_layer
    policy.reference_head = with_bias(head.weight, head.bias).detach()
    inputs = assembled(tokens, mask, **{REFERENCE: tokens.with_values(hidden)})
    out = policy(inputs, frozenset({"log_probs", "ref_kl", "sum_pi_squared"}))

    plain, other = plain_model(model_folder), moved(plain_model(model_folder))
    log_p, log_q = log_softmax(plain, tokens, TEMPERATURE), log_softmax(other, tokens, TEMPERATURE).detach()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1) * mask
    squares = (log_p.exp().square().sum(-1) * mask).detach()
    assert kl.detach().max() > 1e-2
    torch.testing.assert_close(out["ref_kl"], kl, rtol=0, atol=1e-12)
    torch.testing.assert_close(out["sum_pi_squared"], squares, rtol=0, atol=1e-12)
    (out["ref_kl"] * mix[0]).sum().backward()
    (kl * mix[0]).sum().backward()
    assert_same_gradients(policy, plain, 1e-10)


def test_first_values_are_zero_and_the_head_learns(model_folder):
    model = ValueModel(load_policy(model_folder))
    values = model(pack(Ragged.from_list([[3] * 6, [4] * 3]), None, device=CPU), VALUES)["values"]
    assert values.dtype == torch.float32 and values.tolist() == [0.0] * 9
    values.sum().backward()
    assert model.value_head.bias.grad.tolist() == [7.0]
    assert model.value_head.weight.grad.abs().sum() > 0


def test_value_of_a_token_is_read_before_it(model_folder):
    tokens, mask, _ = batch()
    model = ValueModel(load_policy(model_folder, dtype=torch.float64))
    for parameter in (model.value_head.weight, model.value_head.bias):
        torch.nn.init.normal_(parameter)
    got = model(pack(tokens, mask, device=CPU), VALUES)["values"]
    decoder = AutoModel.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="sdpa")
    zero = torch.zeros(1, dtype=torch.float64)
    states = [decoder(row[None]).last_hidden_state[0, :-1] for row in tokens]
    expected = torch.cat([torch.cat([zero, model.value_head(state)[:, 0]]) for state in states])
    assert torch.allclose(got, expected * mask, atol=1e-12, rtol=0)


@pytest.mark.parametrize("model_folder", ["qwen3", *OTHER_HEADS], indirect=True)
def test_a_value_model_keeps_all_weights_but_the_head_under_their_names(model_folder):
    model = ValueModel(load_policy(model_folder))
    found = {model.hf_name(name): parameter.shape for name, parameter in model.named_parameters()}
    whole = dict(plain_model(model_folder).named_parameters())
    left = {name for name in whole if not name.startswith(("lm_head", "embed_out"))}
    assert set(found) == left | model.starts_at_zero
    assert all(found[name] == whole[name].shape for name in left)


def test_a_value_model_has_no_log_probs(qwen2_folder):
    model = ValueModel(load_policy(qwen2_folder))
    with pytest.raises(EngineError, match="log_probs"):
        model(pack(Ragged.from_list([[1, 2]]), None, device=CPU), frozenset({"log_probs"}))
