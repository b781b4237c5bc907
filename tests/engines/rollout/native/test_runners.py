from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from tandem.engines.rollout.borrowed import borrowed
from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.fused import FusedRunner, rounded_rows, why_not_fused
from tandem.engines.rollout.native.module import ModuleRunner
from tandem.engines.rollout.native.paged import PagedCache
from tandem.engines.rollout.native.runner import make_runner
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.engines.rollout.native.weights import Copies, parts_of
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tandem.models.routing import Routing
from tests.engines.rollout.case import CPU, changed, step_of
from tests.support.refusing import refused

BLOCK = 16
FUSED = ["qwen2", "qwen3", "qwen3_window", "llama3_rope", "mistral", "mistral_window"]
FUSED += ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "dots1", "glm4_moe"]
MODULE_ONLY = ["gemma", "gemma2", "gemma3_text", "gpt_oss", "llama4", "deepseek_v3"]
SINGLE = ("dots1", "glm4_moe", "deepseek_v3")  # their routers compute in float32
# Whole prompts, chunks with earlier context, decode, and all of them mixed: of each sequence its number, and
# the first and last + 1 of the tokens that run. Sequence 2 starts on a block that it shares with sequence 0.
STEPS = [
    [(0, 0, 18), (1, 0, 1)], [(0, 18, 19), (2, 16, 33), (1, 1, 2), (3, 0, 5)],
    [(3, 5, 36), (0, 19, 20), (1, 2, 3)], [(3, 36, 39), (2, 33, 34)],
    [(2, 34, 35), (3, 39, 40), (0, 20, 21), (1, 3, 4)], [(1, 4, 5), (0, 21, 22), (3, 40, 41)],
]  # fmt: skip
LENGTHS = [22, 5, 35, 41]


@pytest.fixture
def sequences():
    rng = np.random.default_rng(2)
    tokens = [torch.from_numpy(rng.integers(0, 97, size=length)) for length in LENGTHS]
    tokens[2][:BLOCK] = tokens[0][:BLOCK]
    return tokens


def step_input(sequences, shares, groups=1):
    """Return the step over scattered blocks out of 64, none of them 0."""
    numbers = torch.randperm(63, generator=torch.Generator().manual_seed(4))
    tables = numbers[: 28 * groups].view(groups, 4, 7) + 1
    tables[:, 2, 0] = tables[:, 0, 0]
    numbers, starts, stops = (list(column) for column in zip(*shares, strict=True))
    counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
    ids = torch.cat([sequences[number][start:stop] for number, start, stop in shares])
    return step_of(tables[:, numbers], stops, counts, BLOCK, ids)


def plain_capped(layer, query, key, value, mask, scaling, softcap, sliding_window, **_):
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
    age = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    hidden = (age < 0) | (age >= (sliding_window or len(age)))
    scores = softcap * torch.tanh(query @ key.mT * scaling / softcap)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("plain_capped", plain_capped)


def attention_of(runner, name="torch"):
    return make_attention(PagedCache(runner.layers, 64, BLOCK, runner.dtype, runner.device), name)


def logits_of(runner, sequences, attention="torch"):
    over = attention_of(runner, attention)
    with torch.inference_mode():
        steps = [step_input(sequences, shares, len(over.cache.groups.windows)) for shares in STEPS]
        return torch.cat([runner.forward(step, over) for step in steps])


def reference(model, sequences):
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
    if model == "mistral_window":  # the window matters
        assert (expected - reference(tiny("mistral", torch.float64), sequences)).abs().max() > 0.1
    limit = 1e-5 if model in SINGLE else 1e-10
    automatic = make_runner("auto", module, 64)
    assert type(automatic) is (FusedRunner if model in FUSED else ModuleRunner)
    few = step_input(sequences, STEPS[0], len(attention_of(automatic).cache.groups.windows))
    few = replace(few, logits_L=torch.tensor([8, 2]))  # only some are wanted
    for runner in (automatic, ModuleRunner(module, 64)):
        torch.testing.assert_close(logits_of(runner, sequences), expected, atol=limit, rtol=0)
        with torch.inference_mode():
            wanted = runner.forward(few, attention_of(runner))
        torch.testing.assert_close(wanted, expected[[8, 2]], atol=limit, rtol=0)


@pytest.mark.parametrize("attention", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *((name, torch.float32) for name in ("qwen2", "qwen3_window", "gemma2", "qwen2_moe", "glm4_moe")),
        *((name, torch.bfloat16) for name in ("qwen3", "qwen3_moe")),
    ],
)
def test_errors_of_rounding_are_those_of_a_full_forward(model, dtype, attention, tiny, sequences):
    exact, module = reference(tiny(model, torch.float64), sequences).log_softmax(-1), tiny(model, dtype)

    def errors(logits):
        return (logits.double().log_softmax(-1) - exact).abs()

    plain = errors(reference(module, sequences))
    for runner in (make_runner("auto", module, 64), ModuleRunner(module, 64)):
        found = errors(logits_of(runner, sequences, attention))
        if dtype == torch.float32:
            assert found.max() < max(2 * plain.max(), 1e-5)
        else:
            assert found.mean() < 1.2 * plain.mean()


SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64}


def test_another_architecture_runs_through_the_module(sequences):
    torch.manual_seed(0)
    config = GPTNeoXConfig(**SIZES, num_hidden_layers=2, num_attention_heads=4)
    module = GPTNeoXForCausalLM(config).double().eval()
    refused(EngineError, lambda: make_runner("fused", module, 64), "gpt_neox")
    runner = make_runner("auto", module, 64)
    torch.testing.assert_close(logits_of(runner, sequences), reference(module, sequences), atol=1e-10, rtol=0)


def with_another_layer(model):
    mlp = model.model.layers[1].mlp
    mlp.up_proj = nn.Sequential(mlp.up_proj)


@pytest.mark.parametrize(("change", "reason"), [
    (lambda m: m.config.rope_parameters.update(rope_type="dynamic"), "rope"),
    (lambda m: setattr(m.config, "hidden_act", "gelu"), "gelu"), (with_another_layer, "up_proj"),
])  # fmt: skip
def test_what_fused_does_not_know_is_said(change, reason, tiny):
    module = tiny()
    assert why_not_fused(module) is None
    change(module)
    assert reason in why_not_fused(module)


def test_products_have_few_shapes():
    rows = (0, 3, 8, 9, 64, 65, 130, 1000)
    assert list(map(rounded_rows, rows)) == [1, 4, 8, 16, 64, 72, 144, 1024]


def test_other_attention_is_refused(tiny):
    module = tiny()
    module.config.num_hidden_layers = 3  # one more layer than there are calls of attention
    refused(EngineError, lambda: ModuleRunner(module, 64), "2 calls from 3 layers")


def test_angles_that_depend_on_other_sequences_are_refused(tiny):
    module = tiny()
    module.config.rope_parameters.update(rope_type="dynamic", factor=2.0)
    ModuleRunner(module, 256)  # up to max_position_embeddings the angles are constant
    refused(EngineError, lambda: ModuleRunner(module, 257), r"dynamic and sequences of up to 257 tokens")


COPIED = ("qwen2", "qwen3", "llama3_rope", "mistral_window")
MIXED = ("qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe")


@torch.inference_mode()
def prompt_logits(runner):
    cache = PagedCache(runner.layers, 4, 16, runner.dtype, CPU)
    tables = torch.arange(2 * len(cache.groups.windows)).view(-1, 1, 2)
    step = step_of(tables, [20], [20], 16, (7 * torch.arange(20) + 3) % 97)
    return runner.forward(step, make_attention(cache, "torch"))


@pytest.mark.parametrize(
    ("model", "rank"), [*product(COPIED, (None, 0, 1)), *((model, None) for model in MIXED)]
)
def test_copies_give_what_the_module_gives_and_follow_it(model, rank, tiny):
    module, split = tiny(model, torch.float64), WHOLE if rank is None else LayerSplit(rank, 2)
    copied = FusedRunner(module, 64, split, copies=True)
    for seed in range(2):
        before, reads = prompt_logits(copied), [tensor.data_ptr() for tensor in copied.reads()]
        torch.testing.assert_close(before, prompt_logits(FusedRunner(module, 64, split)), atol=1e-12, rtol=0)
        changed(module, seed)
        assert torch.equal(prompt_logits(copied), before)  # it reads nothing from the module
        assert copied.renew(module) and (prompt_logits(copied) - before).abs().max() > 0.1
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


@pytest.mark.parametrize("model", [*COPIED, *MIXED])
def test_copies_have_the_digest_of_the_module(model, tiny):
    module = tiny(model)
    runner = FusedRunner(module, 64, copies=True)
    assert digest(runner.copied(module)) == digest(module.named_parameters())
    changed(module)
    assert digest(runner.copied(module)) != digest(module.named_parameters())
    assert runner.renew(module) and digest(runner.copied(module)) == digest(module.named_parameters())
    assert FusedRunner(module, 64).copied(module) is None


@pytest.mark.parametrize("model", ["deepseek_v3", "gpt_oss"])
def test_packed_experts_follow_the_module(model, tiny):
    module = tiny(model)
    runner = ModuleRunner(module, 64)
    for seed in range(2):
        expected = module((7 * torch.arange(20)[None] + 3) % 97).logits[0]
        torch.testing.assert_close(prompt_logits(runner), expected, atol=1e-4, rtol=0)
        changed(module, seed)
        assert runner.renew(module)


def test_experts_are_not_split(tiny):
    refused(
        EngineError, lambda: make_runner("auto", tiny("mixtral"), 64, LayerSplit(0, 2)), "split a mixture"
    )


def test_a_step_tells_its_experts(tiny, sequences):
    """As many as the router's probabilities say: two of six."""
    runner, routing = FusedRunner(tiny("mixtral"), 64), Routing(records=True)
    step = step_input(sequences, STEPS[0])
    runner.mixtures.routing = routing
    with torch.inference_mode():
        runner.forward(step, attention_of(runner))
    chosen = routing.experts()[: len(step.ids_T)]
    assert chosen.shape == (19, 2, 2) and (chosen < 6).all() and (chosen[..., 0] != chosen[..., 1]).all()


def test_only_the_same_model_is_taken_over(tiny):
    runner = FusedRunner(tiny("qwen2"), 64, copies=True)
    before = prompt_logits(runner)
    assert not runner.renew(tiny("qwen3")) and not runner.renew(tiny("qwen2", torch.float64))
    assert torch.equal(prompt_logits(runner), before) and runner.renew(changed(tiny("qwen2")))
    assert not torch.equal(prompt_logits(runner), before)


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "qwen2_moe"])
def test_the_modules_own_weights_are_read_where_they_are(model, tiny, monkeypatch):
    """As on a device where copies would take the cache's memory. Norms per head are copied in any case."""
    monkeypatch.setattr("tandem.engines.rollout.native.fused.PACK_UP_TO_BYTES", 0)
    module = tiny(model, torch.float64)
    runner = FusedRunner(module, 64)
    changed(module)
    assert runner.renew(module)
    torch.testing.assert_close(prompt_logits(runner), prompt_logits(FusedRunner(module, 64)), atol=0, rtol=0)
    assert not runner.renew(tiny(model, torch.float64))  # equal weights at other addresses
    assert not FusedRunner(module, 64).release_weights()
