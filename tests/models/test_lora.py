"""Adapters compared with a slow reference and with peft's model, and refused settings."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tandem.config.model import BackboneConfig
from tandem.errors import ConfigError
from tandem.models import lora
from tandem.models.loading import load_policy, load_scorer
from tandem.models.packing import pack
from tandem.models.policy import PolicyModel
from tandem.protocol import Ragged

RANK, ALPHA = 3, 6
IDS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8, 9, 7, 9, 3]]


def section(folder, **keys):
    return BackboneConfig(path=str(folder), **{"lora_rank": RANK, "lora_alpha": ALPHA, **keys})


def adapted(folder, **keys):
    """Return a policy in float64 with adapters whose B is not zero."""
    backbone = load_policy(folder, dtype=torch.float64)
    lora.add_adapters(backbone, section(folder, **keys), "policy", torch.float64)
    model = PolicyModel(backbone)
    lora.draw_adapters(model)
    lora.train_adapters_alone(model, None, torch.float64)
    draw = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return model


def values(model):
    """Return weights by the names of the model without adapters, and factors by peft's names."""
    return {model.hf_name(name): p.detach().clone() for name, p in model.named_parameters()}


def by_hand(folder, found):
    """Return transformers' model over W + s B A, and the leaves A and B that get the gradients."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    factors = {name: value.clone().requires_grad_() for name, value in found.items() if ".lora_" in name}
    weights = {}
    for name, p in plain.named_parameters():
        stem, whole = name.removesuffix(".weight"), p.detach().clone()
        if f"{stem}.lora_A.weight" in factors:
            a, b = factors[f"{stem}.lora_A.weight"], factors[f"{stem}.lora_B.weight"]
            whole = whole + ALPHA / RANK * (b @ a)
        weights[name] = whole

    def log_probs(ids):
        out = torch.func.functional_call(plain, weights, (torch.tensor([ids]),), {"use_cache": False})
        log_p = torch.log_softmax(out.logits[0, :-1], -1)
        return log_p.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    return log_probs, factors


def packed(model):
    tokens = Ragged.from_list([torch.tensor(ids) for ids in IDS])
    inputs = pack(tokens, None, device=torch.device("cpu"))
    return model(inputs, frozenset({"log_probs"}))["log_probs"][tokens.positions() > 0]


def test_outputs_and_gradients_are_those_of_merged_weights(model_folder):
    model = adapted(model_folder)
    log_probs, factors = by_hand(model_folder, values(model))
    wanted = torch.cat([log_probs(ids) for ids in IDS])
    found = packed(model)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-10)
    weighting = torch.linspace(-1, 2, len(wanted), dtype=torch.float64)
    (wanted * weighting).sum().backward()
    (found * weighting).sum().backward()
    grads = {model.hf_name(name): p.grad for name, p in model.named_parameters()}
    assert {name for name, grad in grads.items() if grad is not None} == set(factors)
    assert len(factors) == 2 * 2 * 7  # layers, factors, maps
    for name, leaf in factors.items():
        assert leaf.grad.abs().max() > 1e-6
        assert torch.allclose(grads[name], leaf.grad, rtol=1e-9, atol=1e-10), name


def test_forward_and_gradients_are_those_of_peft(qwen2_folder):
    model = adapted(qwen2_folder, target_modules=("q_proj", "down_proj"))
    plain = AutoModelForCausalLM.from_pretrained(qwen2_folder, dtype=torch.float64)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    theirs = get_peft_model(plain, config, autocast_adapter_dtype=False)
    state = theirs.state_dict()
    for name, value in values(model).items():
        if ".lora_" in name:
            state[f"base_model.model.{name.removesuffix('.weight')}.default.weight"].copy_(value)
    wanted = []
    for ids in IDS:
        log_p = torch.log_softmax(theirs(torch.tensor([ids])).logits[0, :-1], -1)
        wanted.append(log_p.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    found = packed(model)
    assert torch.allclose(found, torch.cat(wanted), rtol=0, atol=1e-10)
    weighting = torch.linspace(-1, 2, len(found), dtype=torch.float64)
    (found * weighting).sum().backward()
    (torch.cat(wanted) * weighting).sum().backward()
    theirs_by_name = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        if lora.is_adapter(name):
            assert torch.allclose(parameter.grad, theirs_by_name[f"base_model.{name}"].grad, rtol=1e-9), name


def test_without_adapters_it_is_the_base_bit_for_bit(qwen2_folder):
    model, base = adapted(qwen2_folder), PolicyModel(load_policy(qwen2_folder, dtype=torch.float64))
    with torch.no_grad():
        with lora.without_adapters(model):
            assert torch.equal(packed(model), packed(base))
        assert (packed(model) - packed(base)).abs().max() > 0.01
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if lora.is_adapter(name)}


def test_first_values(qwen2_folder):
    """A is Kaiming-uniform as in nn.Linear, B is zero. They are the same only for the same seed."""

    def drawn(seed):
        backbone = load_policy(qwen2_folder)
        lora.add_adapters(backbone, section(qwen2_folder, lora_rank=16), "policy", torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lora.draw_adapters(backbone)
        return {name: p.detach() for name, p in backbone.named_parameters() if lora.is_adapter(name)}

    first, same, other = drawn(1), drawn(1), drawn(2)
    for name, value in first.items():
        assert torch.equal(value, same[name])
        if ".lora_B." in name:
            assert value.abs().max() == 0
            continue
        assert not torch.equal(value, other[name])
        bound = math.sqrt(6 / ((1 + 5) * value.shape[1]))
        assert 0.95 * bound < value.abs().max() <= bound
        assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.15)
    a = [value for name, value in first.items() if ".lora_A." in name and value.shape[1] == 32]
    assert len({float(value[0, 0]) for value in a}) == len(a)


def test_names_and_exceptions(qwen2_folder):
    def names(**keys):
        backbone = load_policy(qwen2_folder, weights=False)
        lora.add_adapters(backbone, section(qwen2_folder, **keys), "policy", torch.float32)
        assert all(p.is_meta for p in backbone.parameters())
        return {name.rpartition(".")[2] for name in lora.adapted_layers(backbone)}

    maps = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert names() == maps
    assert names(target_modules=("v_proj", "up_proj")) == {"v_proj", "up_proj"}
    assert names(exclude_modules=("down_proj",)) == maps - {"down_proj"}
    scorer = load_scorer(qwen2_folder, new_head=True, weights=False)
    lora.add_adapters(scorer, section(qwen2_folder), "score", torch.float32)
    assert {name.rpartition(".")[2] for name in lora.adapted_layers(scorer)} == maps


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_porj",), "did you mean q_proj?"),
        (("q_proj", "gate"), "did you mean gate_proj?"),
        (("lm_head",), "lm_head is not a linear layer"),
        (("q_proj", "embed_tokens"), "embed_tokens is not a linear layer"),
    ],
)
def test_targets_that_cannot_have_adapters_are_refused(model_folder, targets, said):
    backbone = load_policy(model_folder, weights=False)
    with pytest.raises(ConfigError, match=r"model\.target_modules") as caught:
        lora.add_adapters(backbone, section(model_folder, target_modules=targets), "policy", torch.float32)
    assert said in str(caught.value)


def test_without_peft_one_sentence_and_nothing_loaded(qwen2_folder, monkeypatch):
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tandem\[lora\]'"):
        lora.require_peft(section(qwen2_folder))
    lora.require_peft(section(qwen2_folder, lora_rank=0))
