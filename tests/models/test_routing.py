"""Experts in sorted products, and the recorded and replayed choice of experts, against slow references."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tandem.models.experts import EXPERTS
from tandem.models.routing import Mixtures, Routing

E, K, HIDDEN = 6, 3, 16
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 12, "moe_intermediate_size": 12, "vocab_size": 40}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": E, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": E},
    "gpt_oss": {"num_local_experts": E},
    "deepseek_v3": {
        **{"n_routed_experts": E, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 0, **LATENT},
        **{"n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    },
}
LLAMA4 = {"num_local_experts": E, "intermediate_size_mlp": 12, "pad_token_id": 0, "moe_layers": [1]}


def mixture(kind: str, experts: str = EXPERTS) -> Any:
    torch.manual_seed(3)
    config = CONFIG_MAPPING[kind](**SIZES, **HEADS, **MIXTURES.get(kind, LLAMA4), num_experts_per_tok=K)
    config._experts_implementation = experts
    model = AutoModelForCausalLM.from_config(config).double()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model


def run(model: Any, tokens: int = 9) -> Tensor:
    return model(input_ids=torch.arange(tokens)[None], use_cache=False).logits[0]


def weights(kind: str, logits_NE: Tensor, chosen_NK: Tensor) -> Tensor:
    """Return (N, K) the weights of the chosen experts by the rule of each architecture, written out."""
    if kind == "gpt_oss":
        return logits_NE.gather(1, chosen_NK).softmax(1)
    scores_NE = logits_NE.sigmoid() if kind == "deepseek_v3" else logits_NE.softmax(1)
    picked_NK = scores_NE.gather(1, chosen_NK)
    return picked_NK / picked_NK.sum(1, keepdim=True) * (2.5 if kind == "deepseek_v3" else 1.0)


@pytest.mark.parametrize("kind", [*MIXTURES, "llama4_text"])
def test_sorted_products_give_the_outputs_and_gradients_of_a_loop(kind: str) -> None:
    found, reference = mixture(kind), mixture(kind, "eager")
    Mixtures(found)
    outs = [run(model) for model in (found, reference)]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    for out in outs:
        (out * torch.sin(torch.arange(out.numel()).view_as(out))).sum().backward()
    for (name, p), q in zip(found.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_replayed_choice_has_the_weights_of_the_own_scores(kind: str) -> None:
    model = mixture(kind)
    mixtures, logits = Mixtures(model), dict[int, Tensor]()
    replayed = torch.stack([torch.rand(2, E).argsort(1)[:, :K] for _ in range(9)]).to(torch.uint8)
    seen: list[tuple[Tensor, Tensor]] = []
    for name in mixtures.names:
        experts = model.get_submodule(name)
        experts.register_forward_pre_hook(lambda _, args: seen.append((args[1], args[2])))
    mixtures.routing = Routing(replayed, observe=lambda at, x, _: logits.setdefault(at, x).logsumexp(1).sum())
    run(model).sum().backward()
    for layer, total in mixtures.routing.observed.items():
        torch.testing.assert_close(total, logits[layer].logsumexp(1).sum())
    assert sorted(mixtures.routing.observed) == [0, 1]
    assert mixtures.routing.sigmoid == (kind == "deepseek_v3")
    for layer, (chosen_NK, weights_NK) in enumerate(seen):
        assert torch.equal(chosen_NK, replayed[:, layer].long())
        expected_NK = weights(kind, logits[layer], chosen_NK)
        # Mixtral and DeepSeek compute their scores in fp32.
        torch.testing.assert_close(weights_NK.double(), expected_NK.double(), rtol=1e-5, atol=1e-6)
    gate = model.model.layers[0].mlp
    assert (gate.router if kind == "gpt_oss" else gate.gate).weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", MIXTURES)
def test_replaying_a_recorded_choice_changes_nothing(kind: str) -> None:
    model = mixture(kind)
    plain = run(model)
    mixtures = Mixtures(model)
    mixtures.routing = Routing(records=True)
    assert torch.equal(run(model), plain)
    experts_NLK = mixtures.routing.experts()
    assert experts_NLK.shape == (9, 2, K) and (mixtures.experts, mixtures.each, mixtures.layers) == (E, K, 2)
    mixtures.routing = Routing(experts_NLK)
    assert torch.equal(run(model), plain)


@pytest.mark.parametrize("kind", MIXTURES)
def test_routers_score_in_fp32(kind: str) -> None:
    model = mixture(kind).bfloat16()
    mixtures, logits = Mixtures(model), dict[int, Tensor]()
    states: list[Tensor] = []
    mlp = model.model.layers[0].mlp
    router = mlp.router if kind == "gpt_oss" else mlp.gate
    router.register_forward_pre_hook(lambda _, args: states.append(args[0].flatten(0, -2)))
    mixtures.routing = Routing(observe=lambda at, x, _: logits.setdefault(at, x).sum())
    assert run(model).dtype == torch.bfloat16
    wide = states[0].float() @ router.weight.float().T
    wide = wide + router.bias.float() if kind == "gpt_oss" else wide
    torch.testing.assert_close(logits[0], wide, rtol=1e-5, atol=1e-5)
