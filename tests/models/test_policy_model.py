import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.errors import ConfigError, EngineError
from tandem.models.loading import load_policy
from tandem.models.packing import pack
from tandem.models.policy import PolicyModel
from tandem.protocol import Ragged

CPU = torch.device("cpu")
BOTH = frozenset({"log_probs", "entropy"})
LENGTHS = [5, 1, 30, 12, 12, 2, 9]
TEMPERATURE = 0.7


def batch():
    tokens = Ragged.from_list([torch.randint(0, 31, (length,)) for length in LENGTHS])
    mask = (tokens.positions() >= 2) & (torch.rand(len(tokens.values)) < 0.8)
    return tokens, mask, torch.randn(2, len(tokens.values), dtype=torch.float64)


def plain(folder, tokens):
    """Return log_probs and entropy of each sequence alone, from transformers' forward."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    log_probs, entropy = [], []
    for row in tokens:
        log_p = torch.log_softmax(model(row[None]).logits[0] / TEMPERATURE, -1)
        first = torch.zeros(1, dtype=torch.float64)
        log_probs.append(torch.cat([first, log_p[:-1].gather(1, row[1:, None])[:, 0]]))
        entropy.append(torch.cat([first, -(log_p.exp() * log_p).sum(-1)[:-1]]))
    return model, torch.cat(log_probs), torch.cat(entropy)


@pytest.mark.parametrize("pad_to_longest", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_each_sequence_alone(model_folder, pad_to_longest, checkpointing):
    tokens, mask, mix = batch()
    language_model = load_policy(model_folder, dtype=torch.float64)
    if checkpointing:
        language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = PolicyModel(language_model, temperature=TEMPERATURE)
    out = policy(pack(tokens, mask, device=CPU, pad_to_longest=pad_to_longest), BOTH)
    reference, log_probs, entropy = plain(model_folder, tokens)
    assert torch.allclose(out["log_probs"], log_probs * mask, atol=1e-12, rtol=0)
    assert torch.allclose(out["entropy"], entropy * mask, atol=1e-12, rtol=0)

    (out["log_probs"] * mix[0] + out["entropy"] * mix[1]).sum().backward()
    ((log_probs * mix[0] + entropy * mix[1]) * mask).sum().backward()
    expected = dict(reference.named_parameters())
    for name, parameter in policy.named_parameters():
        want = expected[policy.hf_name(name)].grad
        assert (parameter.grad - want).norm() <= 1e-11 * want.norm(), name


def test_without_padding_no_padding_is_computed(qwen2_folder):
    tokens, mask, _ = batch()
    policy = PolicyModel(load_policy(qwen2_folder))
    seen = []
    policy.decoder.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    for pad_to_longest in (False, True):
        policy(pack(tokens, mask, device=CPU, pad_to_longest=pad_to_longest), BOTH)
    assert seen == [sum(max(n - 1, 1) for n in LENGTHS), len(LENGTHS) * (max(LENGTHS) - 1)]


def test_only_what_is_asked_for(qwen2_folder):
    tokens, mask, _ = batch()
    policy = PolicyModel(load_policy(qwen2_folder))
    inputs = pack(tokens, mask, device=CPU)
    assert set(policy(inputs, frozenset({"log_probs"}))) == {"log_probs"}
    with pytest.raises(ConfigError, match="temperature"):
        PolicyModel(policy.model, temperature=0.0)
    with pytest.raises(EngineError, match="values"):
        policy(inputs, frozenset({"values"}))
