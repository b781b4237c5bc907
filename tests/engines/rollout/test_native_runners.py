"""Both runners against transformers' plain full forward."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tandem.engines.rollout.native import fused
from tandem.engines.rollout.native.cache import KVCache
from tandem.engines.rollout.native.fused import FusedRunner, why_not_fused
from tandem.engines.rollout.native.module import ModuleRunner
from tandem.engines.rollout.native.runner import make_runner
from tandem.errors import EngineError

LENGTHS = [9, 1, 17, 30]
STEPS = 12


def logits_of(runner, sequences):
    """Prefill of each sequence's prompt and forced decode of its rest: (sequence, 1 + STEPS, V)."""
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    for row, (sequence, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
        ids[row, :length] = sequence[:length]
    lengths = torch.tensor(LENGTHS)
    rows = torch.arange(len(LENGTHS))
    with torch.inference_mode():
        prefill = runner.prefill(ids, lengths)
        cache = KVCache(runner.layers, len(LENGTHS), runner.dtype, runner.device)
        cache.store(prefill, rows, rows, lengths)
        out = [prefill.logits_BV]
        for step in range(STEPS):
            tokens = torch.stack([s[n + step] for s, n in zip(sequences, LENGTHS, strict=True)])
            out.append(runner.decode(tokens, cache.plan(np.array(LENGTHS) + step), cache))
    return torch.stack(out, 1)


def reference(model, sequences):
    with torch.no_grad():
        return torch.stack(
            [model(s[None]).logits[0, n - 1 : n + STEPS] for s, n in zip(sequences, LENGTHS, strict=True)]
        )


@pytest.fixture
def sequences():
    rng = np.random.default_rng(2)
    return [torch.from_numpy(rng.integers(0, 97, size=n + STEPS)) for n in LENGTHS]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("model", ["qwen2", "qwen3", "llama3_rope", "mistral"])
def test_fused_module_and_full_forward_agree(model, dtype, tolerance, tiny, sequences):
    module = tiny(model, dtype)
    expected = reference(module, sequences)
    assert expected.abs().max() > 1
    automatic = make_runner("auto", module, 64)
    assert isinstance(automatic, FusedRunner)
    for runner in (automatic, ModuleRunner(module)):
        torch.testing.assert_close(logits_of(runner, sequences), expected, atol=tolerance, rtol=0)


def test_separate_weights_give_the_same(tiny, sequences, monkeypatch):
    """As used for large models and on other devices than a CPU."""
    module = tiny("qwen2", torch.float64)
    joined = FusedRunner(module, 64)
    monkeypatch.setattr(fused, "_JOIN_UP_TO_BYTES", 0)
    separate = FusedRunner(module, 64)
    assert len(joined._layers[0].qkv) == 1
    assert (
        separate._layers[0].qkv[1][0].data_ptr() == module.model.layers[0].self_attn.k_proj.weight.data_ptr()
    )
    torch.testing.assert_close(
        logits_of(separate, sequences), logits_of(joined, sequences), atol=1e-12, rtol=0
    )


def test_bf16_stays_close(tiny, sequences):
    """Half precision rounds differently in each order of operations; all stay near the float64 result."""
    exact = reference(tiny("qwen3", torch.float64), sequences).log_softmax(-1)
    module = tiny("qwen3", torch.bfloat16)
    plain = (reference(module, sequences).double().log_softmax(-1) - exact).abs().mean()
    for runner in (FusedRunner(module, 64), ModuleRunner(module)):
        error = (logits_of(runner, sequences).double().log_softmax(-1) - exact).abs().mean()
        assert error < 1.5 * plain


def test_sliding_window_runs_through_the_module(tiny, sequences):
    module = tiny("mistral_window", torch.float64)
    assert "sliding window of 8" in why_not_fused(module, 64)
    assert why_not_fused(module, 8) is None
    runner = make_runner("auto", module, 64)
    assert isinstance(runner, ModuleRunner)
    torch.testing.assert_close(logits_of(runner, sequences), reference(module, sequences), atol=1e-9, rtol=0)


def test_another_architecture_runs_through_the_module(sequences):
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    module = GPTNeoXForCausalLM(config).double().eval()
    with pytest.raises(EngineError, match="gpt_neox"):
        make_runner("fused", module, 64)
    runner = make_runner("auto", module, 64)
    torch.testing.assert_close(logits_of(runner, sequences), reference(module, sequences), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.config.rope_parameters.update(rope_type="dynamic"), "rope"),
        (lambda m: setattr(m.config, "hidden_act", "gelu"), "gelu"),
        (
            lambda m: setattr(m.model.layers[1].mlp, "up_proj", nn.Sequential(m.model.layers[1].mlp.up_proj)),
            "up_proj",
        ),
    ],
)
def test_what_fused_does_not_know_is_said(change, reason, tiny):
    module = tiny()
    assert why_not_fused(module, 64) is None
    change(module)
    assert reason in why_not_fused(module, 64)


def test_fused_refers_to_the_modules_own_weights(tiny):
    """Only the joined matrices are copies."""
    module = tiny()
    runner = FusedRunner(module, 64)
    assert runner.embedding_VE.data_ptr() == module.model.embed_tokens.weight.data_ptr()
    assert runner.head[0].data_ptr() == module.lm_head.weight.data_ptr()
    assert runner._layers[0].down[0].data_ptr() == module.model.layers[0].mlp.down_proj.weight.data_ptr()


def test_attention_outside_the_interface_is_refused(tiny):
    module = tiny()
    module.config.num_hidden_layers = 3  # one layer more than calls attention
    with pytest.raises(EngineError, match="2 of 3 layers"):
        ModuleRunner(module)
