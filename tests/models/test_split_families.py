"""Small models of every family that can be divided, over two ranks or as stages, equal whole models."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from tandem.config.model import SPLIT_LAYERS, STAGED
from tandem.models.angles import fit_angles
from tandem.models.architectures import may_pack, rows_attention
from tandem.models.attention import PACKED
from tandem.models.collectives import CollectiveMeter
from tandem.models.double_precision import double_precision
from tandem.models.packed_check import check_sequences
from tandem.models.packing import pack
from tandem.models.pipeline import HIDDEN, Pipeline
from tandem.models.policy import PolicyModel
from tandem.models.small_copy import small_copy
from tandem.models.tensor_group import TensorGroup
from tandem.models.tensor_parallel import parallelize
from tests.engines.train.on_ranks import on_ranks
from tests.engines.train.synthetic import relative_difference
from tests.models.small import CPU
from tests.support.marks import slow_but

LOG_PROBS = frozenset({"log_probs"})
KEYS = {
    "cohere": {"use_qk_norm": True},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "head_dim": 16},
    "llama4_text": {"num_local_experts": 4},
    "ministral": {"head_dim": 16},
    "phi": {"qk_layernorm": True},
}
QUICK = ("gpt_oss", "cohere", "olmo3", "qwen3_5_text")
KNOWN = [kind for kind in SPLIT_LAYERS if kind in CONFIG_MAPPING]  # transformers gets new ones
GROUPS = [QUICK, *(tuple(kind for kind in KNOWN if kind not in QUICK)[start::6] for start in range(6))]


def small_model(kind):
    """Return a model with random weights, equal at each call."""
    config = CONFIG_MAPPING[kind](**KEYS.get(kind, {}), pad_token_id=None)
    model_class, config = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], small_copy(config)
    text, packs = config.get_text_config(), may_pack(model_class, config)
    if getattr(text, "intermediate_size", None):
        text.intermediate_size += text.intermediate_size % 2
    attention = PACKED if packs else rows_attention(model_class, config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    fit_angles(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * weight.shape[-1] ** -0.5 * torch.randn_like(weight))
    policy = PolicyModel(model.eval())
    policy.in_rows = not packs
    return policy


def inputs_of(policy):
    return pack(check_sequences(policy.model.config.get_text_config().vocab_size), None, device=CPU)


def learned(policy):
    """Return log-probs, and the gradient of each weight."""
    found = policy(inputs_of(policy), LOG_PROBS)["log_probs"]
    (found * torch.arange(len(found)).sin()).sum().backward()
    named = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
    return {"log_probs": found.detach()}, named


def compare(kinds):
    """Return by family how far log-probs and gradients of split layers are from those of whole layers."""
    group, found = TensorGroup(init_device_mesh("cpu", (2,)), CollectiveMeter()), {}
    for kind in kinds:
        with double_precision():
            whole, split = small_model(kind), small_model(kind)
            parallelize(split, group)
            (wanted, gradients), (outputs, parts) = learned(whole), learned(split)
        joined = {name: part.full_tensor() for name, part in parts.items()}
        cut = [name for name, part in parts.items() if not part.placements[0].is_replicate()]
        found[kind] = (
            relative_difference(outputs, wanted),
            relative_difference(joined, gradients) if joined.keys() == gradients.keys() else "other weights",
            len(cut),
        )
    return found


@pytest.mark.parametrize("kinds", slow_but([QUICK], GROUPS), ids=lambda kinds: kinds[0])
def test_split_layers_compute_and_learn_like_whole_ones(kinds):
    for found in on_ranks(compare, kinds):
        wrong = {kind: each for kind, each in found.items() if not (max(each[:2]) <= 1e-9 and each[2] > 2)}
        assert not wrong


@pytest.mark.parametrize("kind", slow_but(("gpt_oss",), [kind for kind in KNOWN if kind in STAGED]))
def test_stages_in_succession_compute_what_the_whole_computes(kind):
    with double_precision():
        whole = small_model(kind)
        given, hidden = inputs_of(whole), None
        wanted = whole(given, LOG_PROBS)["log_probs"]
        for stage in range(2):
            part = small_model(kind)
            Pipeline(stage, 2, None, None, CollectiveMeter()).cut(part)
            out = part(replace(given, hidden=hidden), LOG_PROBS)
            hidden = out.get(HIDDEN)
    assert torch.allclose(out["log_probs"], wanted, rtol=0, atol=1e-10)
