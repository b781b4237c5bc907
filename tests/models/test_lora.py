"""Adapters compared with merged weights and with peft's model, and refused settings."""

import math

import pytest
import torch

from tandem.config.model import BackboneConfig
from tandem.errors import ConfigError
from tandem.models import lora
from tandem.models.loading import load_policy, load_scorer
from tandem.models.packing import pack
from tandem.models.policy import PolicyModel
from tandem.protocol import Ragged
from tests.models.small import CPU, log_softmax, plain_model

RANK, ALPHA = 3, 6
TOKENS = Ragged.from_list([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8, 9, 7, 9, 3]])
MAPS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


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


def packed(model):
    inputs = pack(TOKENS, None, device=CPU)
    return model(inputs, frozenset({"log_probs"}))["log_probs"][TOKENS.positions() > 0]


@pytest.mark.parametrize("maps", [None, ("q_proj", "down_proj")])
def test_outputs_and_gradients_are_those_of_merged_weights(model_folder, maps):
    """The reference is transformers' model over W + s B A, and its leaves are A and B."""
    model, plain = (
        adapted(model_folder, **({"target_modules": maps} if maps else {})),
        plain_model(model_folder),
    )
    values = {model.hf_name(name): p.detach() for name, p in model.named_parameters()}
    factors = {name: value.clone().requires_grad_() for name, value in values.items() if ".lora_" in name}
    assert len(factors) == 2 * 2 * len(maps or MAPS)  # layers, factors, maps
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    for name in [name for name in factors if ".lora_A." in name]:
        b, target = factors[name.replace(".lora_A.", ".lora_B.")], name.replace(".lora_A.", ".")
        weights[target] = weights[target] + ALPHA / RANK * (b @ factors[name])
    merged = lambda ids: torch.func.functional_call(plain, weights, (ids,), {"use_cache": False})  # noqa: E731
    wanted = log_softmax(merged, TOKENS).gather(1, TOKENS.values[:, None])[:, 0][TOKENS.positions() > 0]
    found = packed(model)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    for each in (found, wanted):
        (each * torch.linspace(-1, 2, len(each), dtype=torch.float64)).sum().backward()
    grads = {model.hf_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(grads) == set(factors)
    for name, leaf in factors.items():
        assert leaf.grad.abs().max() > 1e-6
        assert torch.allclose(grads[name], leaf.grad, rtol=1e-9, atol=1e-10), name


def test_without_adapters_it_is_the_base_bit_for_bit(qwen2_folder):
    model, base = adapted(qwen2_folder), PolicyModel(load_policy(qwen2_folder, dtype=torch.float64))
    with torch.no_grad():
        with lora.without_adapters(model):
            assert torch.equal(packed(model), packed(base))
        assert (packed(model) - packed(base)).abs().max() > 0.01
    assert all(p.requires_grad == lora.is_adapter(name) for name, p in model.named_parameters())


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


@pytest.mark.parametrize(
    ("kind", "keys", "maps"),
    [
        ("policy", {}, MAPS),
        ("policy", {"target_modules": ("v_proj", "up_proj")}, {"v_proj", "up_proj"}),
        ("policy", {"exclude_modules": ("down_proj",)}, MAPS - {"down_proj"}),
        ("score", {}, MAPS),
    ],
)
def test_names_and_exceptions(qwen2_folder, kind, keys, maps):
    load = load_policy if kind == "policy" else lambda *a, **k: load_scorer(*a, new_head=True, **k)
    backbone = load(qwen2_folder, weights=False)
    lora.add_adapters(backbone, section(qwen2_folder, **keys), kind, torch.float32)
    assert all(p.is_meta for p in backbone.parameters())
    assert {name.rpartition(".")[2] for name in lora.adapted_layers(backbone)} == maps


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        *((("q_porj",), "did you mean q_proj?"), (("q_proj", "gate"), "did you mean gate_proj?")),
        (("lm_head",), "lm_head is not a linear layer"),
        (("q_proj", "embed_tokens"), "embed_tokens is not a linear layer"),
    ],
)
def test_targets_that_cannot_have_adapters_are_refused(model_folder, targets, said):
    backbone = load_policy(model_folder, weights=False)
    with pytest.raises(ConfigError) as caught:
        lora.add_adapters(backbone, section(model_folder, target_modules=targets), "policy", torch.float32)
    assert caught.value.field == "model.target_modules" and said in str(caught.value)


def test_without_peft_one_sentence_and_nothing_loaded(qwen2_folder, monkeypatch):
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        lora.require_peft(section(qwen2_folder))
    lora.require_peft(section(qwen2_folder, lora_rank=0))
