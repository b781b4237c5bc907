"""Tests of the fused runner with its own copies: their content, and that they follow the module."""

import pytest
import torch

from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.fused import FusedRunner
from tandem.engines.rollout.native.paged import PagedCache
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.engines.rollout.native.weights import Copies, parts_of
from tandem.engines.weight_sync import digest
from tests.engines.rollout.case import CPU, changed, step_of

MODELS = ("qwen2", "qwen3", "llama3_rope", "mistral_window")


@torch.inference_mode()
def logits_of(runner):
    """Return the logits of a prompt of 20 tokens."""
    cache = PagedCache(runner.layers, 2, 16, runner.dtype, CPU)
    step = step_of(torch.arange(2).int()[None], [20], [20], 16, (7 * torch.arange(20) + 3) % 97)
    return runner.forward(step, make_attention(cache, "torch"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_copies_give_what_the_module_gives_and_follow_it(model, rank, tiny):
    module, split = tiny(model, torch.float64), WHOLE if rank is None else LayerSplit(rank, 2)
    copied = FusedRunner(module, 64, split, copies=True)
    for seed in range(2):
        before, reads = logits_of(copied), [tensor.data_ptr() for tensor in copied.reads()]
        torch.testing.assert_close(before, logits_of(FusedRunner(module, 64, split)), atol=1e-12, rtol=0)
        changed(module, seed)
        assert torch.equal(logits_of(copied), before)  # it reads nothing from the module
        assert copied.renew(module)
        assert (logits_of(copied) - before).abs().max() > 0.1
        assert reads == [tensor.data_ptr() for tensor in copied.reads()]


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_what_is_multiplied_by_the_same_inputs_lies_side_by_side(model, tiny):
    module = tiny(model)
    joined = Copies(parts_of(module, WHOLE)).joined
    attention, mlp = module.model.layers[1].self_attn, module.model.layers[1].mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    assert torch.equal(joined["model.layers.1.qkv"], torch.cat([part.weight for part in parts]))
    assert torch.equal(joined["model.layers.1.gate_up"], gate_up)
    if model == "qwen2":
        assert torch.equal(joined["model.layers.1.qkv.bias"], torch.cat([part.bias for part in parts]))
        assert "head" not in joined  # the head is the embedding
    else:
        assert joined["model.layers.1.qk_norm"].shape == (4 + 2, attention.head_dim)
    held = sum(tensor.numel() * 4 for tensor in joined.values())
    assert FusedRunner(module, 64, copies=True).weight_bytes == held


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
