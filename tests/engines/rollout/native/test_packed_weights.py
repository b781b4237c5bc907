"""Tests of the fused runner with its own copies: their content, and that they follow the module."""

import pytest
import torch

from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.fused import FusedRunner
from tandem.engines.rollout.native.paged import PagedCache, StepInput
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.engines.rollout.native.weights import Copies, parts_of
from tandem.engines.weight_sync import digest

CPU = torch.device("cpu")
MODELS = ("qwen2", "qwen3", "llama3_rope", "mistral_window")


def prompt(count):
    index = torch.arange(count)
    return StepInput(
        ids_T=(7 * index + 3) % 97,
        positions_T=index,
        slots_T=index,
        starts_S1=torch.tensor([0, count], dtype=torch.int32),
        lengths_S=torch.tensor([count], dtype=torch.int32),
        tables_SB=torch.arange(2, dtype=torch.int32)[None],
        logits_L=index,
        max_query=count,
        max_length=count,
    )


@torch.inference_mode()
def logits_of(runner):
    cache = PagedCache(runner.layers, 2, 16, runner.dtype, CPU)
    return runner.forward(prompt(20), make_attention(cache, "torch"))


def changed(module, seed=0):
    """Change the module in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return module


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_copies_give_what_the_module_gives_and_follow_it(model, rank, tiny):
    module, split = tiny(model, torch.float64), WHOLE if rank is None else LayerSplit(rank, 2)
    copied = FusedRunner(module, 64, split, copies=True)
    for seed in range(2):
        torch.testing.assert_close(
            logits_of(copied), logits_of(FusedRunner(module, 64, split)), atol=1e-12, rtol=0
        )
        before, reads = logits_of(copied), [tensor.data_ptr() for tensor in copied.reads()]
        changed(module, seed)
        assert torch.equal(logits_of(copied), before)  # it reads nothing from the module
        assert copied.renew(module)
        assert (logits_of(copied) - before).abs().max() > 0.1
        assert reads == [tensor.data_ptr() for tensor in copied.reads()]


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_what_is_multiplied_by_the_same_inputs_lies_side_by_side(model, tiny):
    module = tiny(model)
    layer = module.model.layers[1]
    joined = Copies(parts_of(module, WHOLE)).joined
    attention = layer.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert torch.equal(joined["model.layers.1.qkv"], torch.cat([part.weight for part in parts]))
    assert torch.equal(
        joined["model.layers.1.gate_up"], torch.cat((layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight))
    )
    if model == "qwen2":
        assert torch.equal(joined["model.layers.1.qkv.bias"], torch.cat([part.bias for part in parts]))
        assert "head" not in joined  # the head is the embedding
    else:
        assert joined["model.layers.1.qk_norm"].shape == (4 + 2, attention.head_dim)
    one = FusedRunner(module, 64, copies=True)
    assert one.weight_bytes == sum(tensor.numel() * 4 for tensor in joined.values())


@pytest.mark.parametrize("model", MODELS)
def test_copies_have_the_digest_of_the_module(model, tiny):
    module = tiny(model)
    runner = FusedRunner(module, 64, copies=True)
    assert digest(runner.copied(module)) == digest(module.named_parameters())
    changed(module)
    assert digest(runner.copied(module)) != digest(module.named_parameters())
    assert runner.renew(module) and digest(runner.copied(module)) == digest(module.named_parameters())
    assert FusedRunner(module, 64).copied(module) is None


def test_only_the_same_model_is_taken_over(tiny):
    runner = FusedRunner(tiny("qwen2"), 64, copies=True)
    before = logits_of(runner)
    assert not runner.renew(tiny("qwen3"))
    assert not runner.renew(tiny("qwen2", torch.float64))
    assert torch.equal(logits_of(runner), before)
    assert runner.renew(changed(tiny("qwen2")))
    assert not torch.equal(logits_of(runner), before)


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_the_modules_own_weights_are_read_where_they_are(model, tiny, monkeypatch):
    """As on a device where copies would take the cache's memory. Norms per head are copied in any case."""
    monkeypatch.setattr("tandem.engines.rollout.native.fused._COPY_UP_TO_BYTES", 0)
    module = tiny(model, torch.float64)
    runner = FusedRunner(module, 64)
    changed(module)
    assert runner.renew(module)
    torch.testing.assert_close(logits_of(runner), logits_of(FusedRunner(module, 64)), atol=0, rtol=0)
    assert not runner.renew(tiny(model, torch.float64))  # equal weights at other addresses
    assert not FusedRunner(module, 64).release_weights()
