"""Shapes of models: their parameters against those of transformers' models."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.model import BackboneConfig
from tandem.errors import ConfigError
from tandem.memory.gathered import Gathered
from tandem.memory.shapes import PUBLISHED, model_shape, published
from tandem.models.lora import add_adapters, is_adapter

KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 50, "head_dim": 16}
ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 40}
ROUTED |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
LATENT |= {"v_head_dim": 10, "attention_bias": True, "num_key_value_heads": 4}
KINDS = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 24},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "gemma2": {},
    "gemma3_text": {},
    "olmo3": {},
    "cohere2": {"tie_word_embeddings": True},
    "phi3": {"pad_token_id": 0},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 6, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 100},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 6},
    "olmoe": {"num_experts": 6, "eos_token_id": 0},
    "minimax_m2": {"num_local_experts": 6, "bos_token_id": 0, "eos_token_id": 0},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 40, "decoder_sparse_step": 2},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_intermediate_size": 40, "moe_layer_end_index": 1},
    "glm4_moe": ROUTED | {"use_qk_norm": True, "attention_bias": True},
    "dots1": ROUTED | {"attention_bias": True},
    "deepseek_v3": ROUTED | LATENT,
    "deepseek_v2": {**ROUTED, **LATENT, "q_lora_rank": None, "num_experts_per_tok": 2},
}
NAMES = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "models/Qwen2.5-Math-7B/": 7_615_616_512,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
}


def counted(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_the_model(kind):
    config = AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind]})
    assert model_shape(config.to_dict()).parameters == counted(config)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_adapters_on_experts_are_those_of_the_model(kind):
    config = AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    keys = {"target_modules": (), "target_parameters": ("experts.gate_up_proj", "experts.down_proj")}
    add_adapters(model, BackboneConfig(path="-", lora_rank=3, **keys), "policy", torch.float32)
    counted = sum(parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name))
    alone, both = (Gathered.of(model_shape(config.to_dict()), lora_rank=3, expert_rank=r) for r in (0, 3))
    assert both.trained - alone.trained == counted


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PUBLISHED)
def test_parameters_of_published_models(pattern):
    without = re.sub(r"\([^()]*\)\?", "", pattern.replace(r"\.", "."))  # the possible results
    name = re.sub(r"\(([^()|]*)[^()]*\)", r"\1", without)  # the first of several
    values = dict(zip(("model_type", *KEYS[:4]), PUBLISHED[pattern], strict=False))
    stored = published(name) or pytest.fail(name)
    assert stored["model_type"] == values["model_type"] and stored["hidden_size"] == values["hidden_size"]
    shape = {key: value for key, value in stored.items() if key != "model_type"}
    config = AutoConfig.for_model(stored["model_type"], **shape)
    assert model_shape(stored).parameters == counted(config)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_known_by_its_name(name):
    assert model_shape(published(name)).parameters == NAMES[name]


def test_what_is_not_known():
    assert {published(name) and name for name in ("gpt2", "x/Qwen2.5-70B", "Qwen2.5-7Bx")} == {None}
    with pytest.raises(ConfigError, match="size is missing") as caught:
        model_shape({"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 9})
    assert caught.value.field == "num_hidden_layers"


def test_the_text_of_a_model_of_several_inputs():
    stored = published("Qwen/Qwen2.5-0.5B")
    assert model_shape({"model_type": "x", "text_config": stored}) == model_shape(stored)


def test_keys_and_values():
    """The KiB per token in bf16 are those published for these models."""
    sizes = {"Qwen2.5-0.5B": 12, "Qwen2.5-1.5B": 28, "Qwen2.5-7B": 56, "Llama-3-70B": 320}
    assert {name: model_shape(published(name)).kv_bytes(2) / 1024 for name in sizes} == sizes
    assert model_shape(published("Llama-3-70B")).kv_bytes(2, split=16) == 40 * 1024  # at least one key head


def test_low_rank_keys_and_values_are_stored_for_each_head_or_as_they_are():
    shape = model_shape(published("deepseek-ai/DeepSeek-V3"))
    assert shape.kv_bytes(2) == 61 * 128 * (192 + 128) * 2
    assert shape.kv_bytes(2, split=8) == 61 * 16 * (192 + 128) * 2
    assert shape.kv_bytes(2, split=8, latent=True) == 61 * (512 + 64) * 2


@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_ranks_that_divide_experts_gather_their_own_and_store_as_much(ranks):
    """Each of 58 layers has 256 experts with three matrices of 7168 · 2048."""
    shape, each = model_shape(published("deepseek-ai/DeepSeek-V3")), 256 * 3 * 7168 * 2048
    whole, divided = (Gathered.of(shape, experts=size, shards=64) for size in (1, ranks))
    assert whole.stored == shape.parameters == pytest.approx(divided.stored)
    assert divided.learned == pytest.approx(shape.parameters)
    assert whole.whole - divided.whole == pytest.approx(58 * each * (1 - 1 / ranks))
    assert divided.experts == each / ranks and divided.unit == shape.plain.split + shape.plain.whole
    assert divided.stay == (58 * each / 64 if ranks == 64 else 0)


def test_the_weights_that_a_token_uses():
    """Published as 37B of 671B, of which 0.9B are the embedding."""
    shape = model_shape(published("deepseek-ai/DeepSeek-V3"))
    assert shape.matrices + shape.embedding == pytest.approx(36.6e9, rel=0.005)
    assert shape.streamed() == pytest.approx(671.0e9 - shape.embedding, rel=0.001)


@pytest.mark.parametrize(("kind", "keys", "options"), [
    ("mistral", (), {"sliding_window": 16}), ("llama", (), {}), ("gemma2", ("layer_types",), {}),
    ("gemma3_text", ("layer_types",), {"num_hidden_layers": 12}), ("qwen2", ("layer_types",), {}),
    ("qwen3", ("layer_types",), {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16}),
    ("gpt_oss", (), {}), ("llama4_text", (), {"attention_chunk_size": 16, "num_hidden_layers": 8}),
])  # fmt: skip
def test_windows_are_those_of_the_layers(kind, keys, options):
    """A file of today names the kinds of the layers, and a file without `keys` is an older one."""
    config = AutoConfig.for_model(kind, **{**SMALL, **options})
    sizes = {
        "sliding_attention": getattr(config, "sliding_window", 0),
        "chunked_attention": getattr(config, "attention_chunk_size", 0),
    }
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    expected = tuple((sizes.get(each) or 0) for each in kinds)
    stored = config.to_dict()
    older = {name: value for name, value in stored.items() if name not in keys}
    assert model_shape(stored).windows == model_shape(older).windows == expected
    assert any(expected) == (kind not in ("llama", "qwen2"))
