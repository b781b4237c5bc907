"""Tests of both runners, step by step over a paged cache, against transformers' plain full forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
)

from tandem.engines.rollout.borrowed import borrowed
from tandem.engines.rollout.native import fused
from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.fused import FusedRunner, rounded_rows, why_not_fused
from tandem.engines.rollout.native.module import ModuleRunner
from tandem.engines.rollout.native.paged import PagedCache, StepInput
from tandem.engines.rollout.native.runner import Runner, make_runner
from tandem.errors import EngineError

BLOCK = 16
FUSED = ["qwen2", "qwen3", "qwen3_window", "llama3_rope", "mistral", "mistral_window"]
MODULE_ONLY = ["gemma", "gemma2", "gemma3_text"]
Share = tuple[int, int, int]
"""A sequence's part of a step: its number, and the first and last + 1 of the tokens that run."""

# Whole prompts, chunks with earlier context, decode, and all of them mixed. Sequence 2 starts on a block that
# it shares with sequence 0.
STEPS: list[list[Share]] = [
    [(0, 0, 18), (1, 0, 1)],
    [(0, 18, 19), (2, 16, 33), (1, 1, 2), (3, 0, 5)],
    [(3, 5, 36), (0, 19, 20), (1, 2, 3)],
    [(3, 36, 39), (2, 33, 34)],
    [(2, 34, 35), (3, 39, 40), (0, 20, 21), (1, 3, 4)],
    [(1, 4, 5), (0, 21, 22), (3, 40, 41)],
]
LENGTHS = [22, 5, 35, 41]


@pytest.fixture
def sequences() -> list[Tensor]:
    rng = np.random.default_rng(2)
    tokens = [torch.from_numpy(rng.integers(0, 97, size=length)) for length in LENGTHS]
    tokens[2][:BLOCK] = tokens[0][:BLOCK]
    return tokens


def tables() -> Tensor:
    """Return scattered block numbers out of 64, none of them 0."""
    numbers = torch.randperm(63, generator=torch.Generator().manual_seed(4))[:28] + 1
    table = numbers.view(4, 7).int()
    table[2, 0] = table[0, 0]
    return table


def step_input(sequences: Sequence[Tensor], shares: Sequence[Share]) -> StepInput:
    table = tables()
    tokens = [(number, place) for number, start, stop in shares for place in range(start, stop)]
    counts = [stop - start for _, start, stop in shares]
    return StepInput(
        ids_T=torch.stack([sequences[number][place] for number, place in tokens]),
        positions_T=torch.tensor([place for _, place in tokens]),
        slots_T=torch.tensor(
            [int(table[number, place // BLOCK]) * BLOCK + place % BLOCK for number, place in tokens]
        ),
        starts_S1=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        lengths_S=torch.tensor([stop for _, _, stop in shares], dtype=torch.int32),
        tables_SB=table[[number for number, _, _ in shares]],
        logits_L=torch.arange(len(tokens)),
        max_query=max(counts),
        max_length=max(stop for _, _, stop in shares),
    )


def plain_capped(layer, query, key, value, mask, scaling, softcap, sliding_window, **_):
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
    age = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    hidden = (age < 0) | (age >= (sliding_window or len(age)))
    scores = softcap * torch.tanh(query @ key.mT * scaling / softcap)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("plain_capped", plain_capped)


def logits_of(runner: Runner, sequences: Sequence[Tensor], attention: str = "torch") -> Tensor:
    """Return the logits of all steps, one after the other."""
    cache = PagedCache(runner.layers, 64, BLOCK, runner.dtype, runner.device)
    over = make_attention(cache, attention)
    with torch.inference_mode():
        return torch.cat([runner.forward(step_input(sequences, shares), over) for shares in STEPS])


def reference(model: nn.Module, sequences: Sequence[Tensor]) -> Tensor:
    """Run transformers' own forward.

    The exception is a softcap: transformers' SDPA ignores it, and its eager attention computes the softmax
    after it in float32.
    """
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    with torch.no_grad(), borrowed(model, "plain_capped") if capped else nullcontext():
        full = [model(sequence[None]).logits[0] for sequence in sequences]
    return torch.cat([full[number][start:stop] for shares in STEPS for number, start, stop in shares])


@pytest.mark.parametrize("model", FUSED + MODULE_ONLY)
def test_runners_and_full_forward_agree(model, tiny, sequences):
    module = tiny(model, torch.float64)
    expected = reference(module, sequences)
    assert expected.abs().max() > 1
    automatic = make_runner("auto", module, 64)
    assert type(automatic) is (FusedRunner if model in FUSED else ModuleRunner)
    for runner in (automatic, ModuleRunner(module, 64)):
        torch.testing.assert_close(logits_of(runner, sequences), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("model", ["qwen2", "qwen3_window", "gemma2"])
@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_float32(model, attention, tiny, sequences):
    module = tiny(model)
    expected = reference(tiny(model, torch.float64), sequences).log_softmax(-1)
    plain = (reference(module, sequences).double().log_softmax(-1) - expected).abs().max()
    for runner in (make_runner("auto", module, 64), ModuleRunner(module, 64)):
        out = logits_of(runner, sequences, attention).double().log_softmax(-1)
        assert (out - expected).abs().max() < max(2 * plain, 1e-5)


def test_a_window_matters(tiny, sequences):
    """Without this test, the tests above would pass for a runner that ignores the window."""
    windowed = tiny("mistral_window", torch.float64)
    whole = tiny("mistral", torch.float64)
    assert (reference(windowed, sequences) - reference(whole, sequences)).abs().max() > 0.1


def test_only_wanted_logits_are_computed(tiny, sequences):
    module = tiny("qwen2", torch.float64)
    step = step_input(sequences, STEPS[0])
    few = StepInput(
        **{name: getattr(step, name) for name in StepInput.__slots__} | {"logits_L": torch.tensor([8, 2])}
    )
    for runner in (FusedRunner(module, 64), ModuleRunner(module, 64)):
        over = make_attention(PagedCache(runner.layers, 64, BLOCK, torch.float64, runner.device), "torch")
        with torch.inference_mode():
            every = runner.forward(step, over)
            torch.testing.assert_close(runner.forward(few, over), every[[8, 2]], atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_modules_own_weights_give_the_same(dtype, tiny, sequences, monkeypatch):
    """As for large models, and on devices other than a CPU."""
    module = tiny("qwen2", dtype)
    copied = FusedRunner(module, 64)
    monkeypatch.setattr(fused, "_COPY_UP_TO_BYTES", 0)
    own = FusedRunner(module, 64)
    attention = module.model.layers[0].self_attn
    assert [weight.data_ptr() for weight in own._layers[0].qkv.weights] == [
        part.weight.data_ptr() for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(
        logits_of(own, sequences), logits_of(copied, sequences), atol=tolerance, rtol=0
    )


@pytest.mark.parametrize("attention", ["torch", "cpu"])
def test_bf16_stays_close(attention, tiny, sequences):
    """Half precision rounds differently in each order of operations. All results stay near float64."""
    exact = reference(tiny("qwen3", torch.float64), sequences).log_softmax(-1)
    module = tiny("qwen3", torch.bfloat16)
    plain = (reference(module, sequences).double().log_softmax(-1) - exact).abs().mean()
    for runner in (FusedRunner(module, 64), ModuleRunner(module, 64)):
        error = (logits_of(runner, sequences, attention).double().log_softmax(-1) - exact).abs().mean()
        assert error < 1.2 * plain


def test_another_architecture_runs_through_the_module(sequences):
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    module = GPTNeoXForCausalLM(config).double().eval()
    with pytest.raises(EngineError, match="gpt_neox"):
        make_runner("fused", module, 64)
    runner = make_runner("auto", module, 64)
    torch.testing.assert_close(logits_of(runner, sequences), reference(module, sequences), atol=1e-10, rtol=0)


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
    assert why_not_fused(module) is None
    change(module)
    assert reason in why_not_fused(module)


@pytest.mark.parametrize(
    ("rows", "expected"), [(0, 1), (3, 4), (8, 8), (9, 16), (64, 64), (65, 72), (130, 144), (1000, 1024)]
)
def test_products_have_few_shapes(rows, expected):
    assert rounded_rows(rows) == expected


def test_attention_outside_the_interface_is_refused(tiny):
    module = tiny()
    module.config.num_hidden_layers = 3  # one more layer than there are calls of attention
    with pytest.raises(EngineError, match="2 of 3 layers"):
        ModuleRunner(module, 64)


def test_chunked_attention_is_refused():
    config = Llama4TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        attention_chunk_size=8,
    )
    with pytest.raises(EngineError, match="chunked_attention"):
        ModuleRunner(Llama4ForCausalLM(config), 64)


def test_angles_that_depend_on_other_sequences_are_refused(tiny):
    module = tiny()
    module.config.rope_parameters.update(rope_type="dynamic", factor=2.0)
    ModuleRunner(module, 256)  # up to max_position_embeddings the angles are constant
    with pytest.raises(EngineError, match=r"dynamic and sequences of up to 257 tokens"):
        ModuleRunner(module, 257)
