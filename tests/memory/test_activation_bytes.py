"""The computed bytes of activations against what layers of tiny models really keep."""

import tempfile
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tandem.config.model import BackboneConfig
from tandem.memory.activations import Decoder, LayerBytes, Setup, fastest_that_fits, layer_bytes
from tandem.memory.gathered import Gathered
from tandem.memory.shapes import model_shape
from tandem.memory.training import Way, update_moments
from tandem.models.activations import manage_activations
from tandem.models.loading import load_policy
from tandem.models.lora import add_adapters, draw_adapters, train_adapters_alone
from tandem.models.packing import pack
from tandem.models.policy import PolicyModel
from tandem.protocol import Ragged
from tests.support.families import FAMILIES
from tests.support.marks import slow_but
from tests.support.tiny import make_model

CPU = torch.device("cpu")
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SHAPES = {
    name: dict(zip(NAMES, sizes, strict=False))
    for name, sizes in {
        "wide": (96, 256, 6, 2), "flat": (128, 160, 8, 8),
        "one key head": (64, 384, 4, 1, 32), "device": (512, 1024, 8, 2, 64),
    }.items()
}  # fmt: skip
KINDS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}
LENGTHS = {"equal": [65] * 6, "spread": [301, 64, 200, 17, 650, 2], "long": [1025]}


def long(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def policy_of(kind, shape, layers, dtype, mode, rank=0):
    torch.manual_seed(0)
    sizes = {"head_dim": 16, **SHAPES[shape]} if kind == "qwen3" else SHAPES[shape]
    config = KINDS[kind](vocab_size=31, num_hidden_layers=layers, **sizes, sliding_window=None)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        backbone = load_policy(folder, dtype=dtype)
        way = {"enable_gradient_checkpointing": False} if mode == "none" else {}
        model = BackboneConfig(path=folder, lora_rank=rank, **way)
    if rank:
        add_adapters(backbone, model, "policy", dtype)
    policy = PolicyModel(backbone)
    if rank:
        train_adapters_alone(policy, None, dtype)
        draw_adapters(policy)
    switch = manage_activations(policy.decoder.layers, model, CPU).switch
    if switch is not None:
        switch.mode = mode
    return policy


class Made(TorchDispatchMode):
    """A record of the memory of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self):
        return sum(nbytes for storage, nbytes in self.found.values() if not storage.expired())


def kept(policy, inputs):
    """Return the bytes that exist after a forward pass only because a backward pass may follow."""
    with Made() as made:
        out = policy(inputs, frozenset({"log_probs"}))["log_probs"]
        before = made.alive()
        del out
    return before - made.alive()


def inputs_of(lengths):
    return pack(Ragged.from_list([torch.randint(0, 31, (n,)) for n in lengths]), None, device=CPU)


def decoder_of(kind, shape, layers=1):
    sizes = SHAPES[shape]
    width = 16 if kind == "qwen3" else sizes["hidden_size"] // sizes["num_attention_heads"]
    counts = (sizes[name] for name in NAMES[:4])
    return Decoder(layers, *counts, head_width=sizes.get("head_dim", width), head_norms=kind == "qwen3")


KEPT = [("qwen2", "wide"), ("qwen3", "flat"), ("llama", "one key head")]
KEPT += [long("mistral", "flat"), long("qwen3", "wide")]


def per_layer(kind, shape, dtype, mode, inputs, rank=0):
    few, many = (kept(policy_of(kind, shape, layers, dtype, mode, rank), inputs) for layers in (2, 5))
    return (many - few) / 3 / inputs.packing.tokens


def assert_kept(kind, shape, dtype, rank=0):
    """Long sequences need no padding and no stored scores, as on a GPU."""
    inputs = inputs_of(LENGTHS["long"])
    estimate = layer_bytes(decoder_of(kind, shape), Setup(dtype.itemsize, lora_rank=rank))
    for mode in ("none", "ops", "full"):
        found = per_layer(kind, shape, dtype, mode, inputs, rank)
        assert estimate.kept(mode) == pytest.approx(found, rel=0.15), mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "shape"), KEPT)
def test_what_a_layer_keeps(kind, shape, dtype):
    assert_kept(kind, shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_a_layer_with_adapters_keeps(dtype):
    assert_kept("qwen2", "wide", dtype, rank=8)


FAMILY = {
    "llama": {}, "gemma2": {"attn_logit_softcapping": 5.0, "sliding_window": 8}, "cohere2": {},
    **{kind: FAMILIES[kind] for kind in ("gpt_oss", "gemma3_text", "olmo3", "llama4_text", "glm4_moe")},
    "gpt_neox": {"intermediate_size": 48, "attention_dropout": 0.0, "hidden_dropout": 0.0},
}  # fmt: skip
"""Windows, chunks, sinks, soft caps, experts, and layers of another kind."""


ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 80}
ROUTED |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
KNOWN = {
    "llama": {}, "qwen3": {}, "gemma2": {}, "gemma3_text": {}, "olmo3": {}, "cohere2": {},
    "phi3": {"pad_token_id": 0}, "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 200},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80},
        **{"shared_expert_intermediate_size": 120, "mlp_only_layers": [1]},
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 80},
    "glm4_moe": ROUTED, "dots1": ROUTED,
    "deepseek_v3": {
        **ROUTED, **{"q_lora_rank": 48, "kv_lora_rank": 40, "qk_rope_head_dim": 8},
        **{"qk_nope_head_dim": 16, "v_head_dim": 24, "head_dim": 8, "num_key_value_heads": 6},
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", slow_but(("gemma2", "gpt_oss"), FAMILY))
def test_what_is_measured_is_what_layers_of_any_kind_keep(kind, dtype, tmp_path):
    """Half of the kinds write scores and copies into rectangles, which no formula knows."""
    make_model(tmp_path, kind=kind, **FAMILY[kind])
    backbone, model = load_policy(tmp_path, dtype=dtype), BackboneConfig(path=str(tmp_path))
    policy, inputs = PolicyModel(backbone), inputs_of(LENGTHS["spread"])
    switch = manage_activations(policy.layers, model, CPU).switch
    with torch.no_grad():
        layer = switch.measured(lambda: policy(inputs, frozenset()))
    seen = {}
    for switch.mode in ("none", "ops", "full"):
        seen[switch.mode] = kept(policy, inputs)
    for mode in ("none", "ops"):
        more = len(policy.layers) * (layer.kept(mode) - layer.kept("full"))
        assert more == pytest.approx(seen[mode] - seen["full"], rel=0.02), mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", slow_but(("cohere2",), KNOWN))
def test_what_layers_of_other_kinds_keep(kind, dtype, tmp_path):
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 6, "head_dim": 16}
    path = make_model(tmp_path, kind=kind, **{"num_key_value_heads": 2, **sizes, **KNOWN[kind]})
    policy, inputs = PolicyModel(load_policy(path, dtype=dtype)), inputs_of(LENGTHS["long"])
    switch = manage_activations(policy.layers, BackboneConfig(path=str(path)), CPU).switch
    with torch.no_grad():
        found = switch.measured(lambda: policy(inputs, frozenset()))
    kinds = model_shape(policy.decoder.config.to_dict()).decoder.kinds
    layers = [(share, layer_bytes(each, Setup(dtype.itemsize))) for share, each in kinds]
    estimate = LayerBytes(*(sum(share * layer[i] for share, layer in layers) for i in range(4)))
    found = LayerBytes(*(size / inputs.packing.tokens for size in found))
    if kinds[0][1].experts.chosen:  # "ops" keeps the products of experts on a CPU, and not on a GPU
        assert estimate.saved == pytest.approx(found.saved, rel=0.06)
        return
    for mode in ("none", "ops", "full"):
        assert estimate.kept(mode) == pytest.approx(found.kept(mode), rel=0.06), mode
    if dtype == torch.bfloat16:  # in fp32, norms save the outputs of some products
        assert estimate.again("ops") == pytest.approx(found.again("ops"), rel=0.06)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_what_a_layer_keeps_on_cuda(kind):
    """In bf16, with the variable-length kernel. PyTorch's allocator rounds up a little."""
    device = torch.device("cuda")
    lengths = [3000, 1, 700, 1900, 64]
    inputs = pack(Ragged.from_list([torch.randint(0, 31, (n,)) for n in lengths]), None, device=device)
    estimate = layer_bytes(decoder_of(kind, "device"), Setup(torch.bfloat16.itemsize))
    for mode in ("none", "ops", "full"):
        found = []
        for layers in (2, 5):
            policy = policy_of(kind, "device", layers, torch.bfloat16, mode).to(device)
            before = torch.cuda.memory_allocated()
            out = policy(inputs, frozenset({"log_probs"}))
            found.append(torch.cuda.memory_allocated() - before)
            del out
        each = (found[1] - found[0]) / 3 / inputs.packing.tokens
        assert estimate.kept(mode) == pytest.approx(each, rel=0.15), mode


def test_saved_tensors_are_what_is_kept():
    """Two measures agree: the tensors that autograd saves, and the memory in use."""
    policy, inputs = policy_of("qwen2", "wide", 3, torch.float32, "none"), inputs_of(LENGTHS["long"])
    storages = {}

    def run(layer, forward, *args, **kwargs):
        shared = [
            *layer.parameters(),
            *kwargs["attention_mask"].tokens.tensors,
            *kwargs["position_embeddings"],
        ]
        outside = {tensor.untyped_storage().data_ptr() for tensor in (*shared, kwargs["position_ids"])}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in outside:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return forward(*args, **kwargs)

    layer = policy.decoder.layers[1]
    layer.forward = partial(run, layer, layer.forward)
    assert policy(inputs, frozenset({"log_probs"}))
    found = sum(storages.values()) / inputs.packing.tokens
    expected = layer_bytes(decoder_of("qwen2", "wide"), Setup(4)).saved
    assert expected == pytest.approx(found, rel=0.02)


QWEN = Decoder(28, 1536, 8960, 12, 2, 128)
"""Qwen2.5-1.5B."""


def test_figures_of_a_known_model():
    """Two norms: 8 bytes per feature and 4. Attention: 2·(2·1536 + 2·256) + 4·12. The MLP: 4 · 2·8960."""
    setup = Setup(itemsize=2)
    assert layer_bytes(QWEN, setup).kept("none") == 2 * (8 * 1536 + 4) + 7168 + 48 + 71680
    assert layer_bytes(QWEN, setup).kept("full") == 3072
    outputs = 2 * (1536 + 2 * 256 + 1536 + 2 * 8960 + 1536)
    assert layer_bytes(QWEN, setup).kept("ops") == 3072 + outputs + 3072 + 48
    fused = layer_bytes(QWEN, Setup(itemsize=2, fused=True)).saved
    assert fused == 2 * (4 * 1536 + 4) + 7168 + 48 + 3 * 17920


def test_what_ranks_share():
    """Two ranks that split layers halve heads and MLP. Four ranks that share tokens repeat two key heads."""
    halves = Decoder(28, 1536, 4480, 6, 1, 128)
    for mode in ("none", "ops", "full"):
        assert layer_bytes(QWEN, Setup(2, tensor=2)).kept(mode) == layer_bytes(halves, Setup(2)).kept(mode)
    alone, shared = (layer_bytes(QWEN, Setup(2, sequence=ranks)).kept("none") for ranks in (1, 4))
    assert shared - alone == 2 * 1536 + 2 * 2 * (4 - 2) * 128


def most(layers, **options):
    """Return the bytes of activations for 1,000 tokens, at the head's backward."""
    mode = options.pop("mode", "none")
    way = Way(Setup(2, **options), master=4, shards=8, mode=mode)
    decoder = Decoder(layers, 1536, 8960, 12, 2, 128)
    moments = update_moments(Gathered(layers, 1, 1, 0, 1, 1, 1, 1), decoder, way, 1000)
    return next(moment for moment in moments if moment.name == "head, backward").activations


def test_layers_micro_batches_and_offload_multiply():
    each = layer_bytes(QWEN, Setup(2)).kept("none") * 1000
    assert most(2) - most(1) == pytest.approx(each)
    assert most(28) - most(1) == pytest.approx(27 * each)
    assert most(28, held=3) - most(1) == pytest.approx((3 * 28 - 1) * each)
    assert most(28, offloaded=True) == most(2)
    assert most(28, mode="full") - most(1, mode="full") == pytest.approx(27 * 3072 * 1000)


def test_the_fastest_that_fits():
    needed = {"none": 30, "ops": 20, "full": 10}
    assert [fastest_that_fits(needed, free) for free in (30, 29, 20, 19, 9, -1)] == [
        *("none", "ops", "ops", "full", "full", "full")
    ]
    assert fastest_that_fits({"none": 30, "full": 10}, 25) == "full"
