"""Measure decoding: one step of a batch at one context length, as the engine runs it.

A step is the forward by CUDA graph and the sampling of the tokens. The bound of a step is
`shapes.decode_seconds`. Three parts are timed separately: the forward without the graph, the sampling, and
the attention of all layers, as bytes of keys and values per second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.device.rates import Rates, clock, seconds
from benchmarks.device.report import Row, Setting, Skipped
from benchmarks.device.shapes import SIZES, build, decode_seconds, kv_bytes
from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.draws.sampler import RowParams, sample
from tandem.engines.rollout.native.attention import Attention, make_attention
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.graphs import GraphedRunner
from tandem.engines.rollout.native.paged import PagedCache, StepInput, bytes_per_token
from tandem.engines.rollout.native.runner import Runner, make_runner
from tandem.protocol import Request, SamplingParams

BLOCK_SIZE = 16
STEPS = (  # model, sequences, tokens of each sequence; the performance goal is about the first two
    ("1.5B", 256, 1024),
    ("1.5B", 256, 7680),
    ("1.5B", 64, 14336),
    ("1.5B", 64, 1024),
    ("0.5B", 256, 1024),
    ("7B", 256, 1024),
)


def rows(setting: Setting) -> list[Row]:
    steps = [("tiny", 8, 64)] if setting.tiny else STEPS
    measured = [
        Row(
            step_name(size, batch, context),
            partial(decode, size=size, batch=batch, context=context),
            expects_s=20 if size == "7B" else 10,
            bound=partial(tokens_per_s, size=size, batch=batch, context=context),
        )
        for size, batch, context in steps
    ]
    return [*measured, Row("greedy responses as transformers writes them", agreement, 15, unit="of 16")]


def step_name(size: str, batch: int, context: int) -> str:
    return f"{size}, batch {batch}, context {context}"


def tokens_per_s(rates: Rates, size: str, batch: int, context: float) -> float:
    return batch / decode_seconds(size, batch, context, rates.copy, rates.product)


@torch.inference_mode()
def decode(setting: Setting, size: str, batch: int, context: int, repeats: int = 20) -> dict[str, Any]:
    device = setting.device
    module = build(size, torch.bfloat16, device)
    runner = make_runner("auto", module, context)
    blocks = batch * -(-context // BLOCK_SIZE)
    check_fits(blocks * BLOCK_SIZE * bytes_per_token(runner.layers, runner.dtype), device)
    cache = PagedCache(runner.layers, blocks, BLOCK_SIZE, runner.dtype, device)
    for part in (*cache.keys, *cache.values):
        part.normal_()
    attention = make_attention(cache)
    vocabulary = SIZES[size]["vocab_size"]
    step = decode_step(batch, context, vocabulary, device)
    forward: Runner = runner
    if device.type == "cuda":
        forward = GraphedRunner(runner, attention, batch, step.tables_GSB[0].shape[1])
    ones, zeros = np.ones(batch), np.zeros(batch)
    params = RowParams.of(ones, zeros.astype(np.int64), ones, zeros, vocabulary, device)
    uniforms_R = torch.rand(batch, dtype=torch.float64, device=device)
    first = clock(lambda: forward.forward(step, attention), device)
    logits = forward.forward(step, attention).clone()

    def whole() -> Tensor:
        return sample(forward.forward(step, attention), uniforms_R, params).tokens_R

    repeats = 2 if setting.tiny else repeats
    took = seconds(whole, device, repeats)
    attended = seconds(every_attention(runner, attention, step, size), device, repeats)
    return {
        "value": batch / took,
        "first_s": first,
        "step_ms": 1e3 * took,
        "graph_ms": 1e3 * seconds(lambda: forward.forward(step, attention), device, repeats),
        "eager_ms": 1e3 * seconds(lambda: runner.forward(step, attention), device, repeats),
        "sample_ms": 1e3 * seconds(lambda: sample(logits, uniforms_R, params), device, repeats),
        "attention_ms": 1e3 * attended,
        "attention_gb_per_s": batch * context * kv_bytes(size) / attended / 1e9,
        "finite": bool(logits.isfinite().all()),
    }


def decode_step(batch: int, context: int, vocabulary: int, device: torch.device) -> StepInput:
    """Return a step with one new token for each of `batch` sequences, in scattered cache blocks.

    Each sequence has `context` tokens including the new one.
    """
    generator = torch.Generator().manual_seed(0)
    width = -(-context // BLOCK_SIZE)
    tables_SB = torch.randperm(batch * width, generator=generator).view(batch, width)
    position = context - 1
    slots_T = tables_SB[:, -1] * BLOCK_SIZE + position % BLOCK_SIZE
    return StepInput(
        ids_T=torch.randint(vocabulary, (batch,), generator=generator).to(device),
        positions_T=torch.full((batch,), position, device=device),
        levels_T=torch.zeros(batch, dtype=torch.int64, device=device),
        starts_S1=torch.arange(batch + 1, dtype=torch.int32, device=device),
        lengths_S=torch.full((batch,), context, dtype=torch.int32, device=device),
        logits_L=torch.arange(batch, device=device),
        slots_GT=(slots_T.to(device),),
        tables_GSB=(tables_SB.int().to(device),),
        max_query=1,
        max_length=context,
    )


def check_fits(needed: int, device: torch.device) -> None:
    """Check that the cache leaves at least a tenth of the free memory.

    Raises:
        Skipped: the cache needs too much memory.
    """
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if needed > 0.9 * free:
        raise Skipped(f"the cache needs {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free")


def every_attention(runner: Runner, attention: Attention, step: StepInput, size: str) -> Callable[[], None]:
    """Return a function that runs only the attention of every layer."""
    heads, width = SIZES[size]["num_attention_heads"], runner.layers[0].key_dim
    query_TND = torch.randn(len(step.ids_T), heads, width, dtype=runner.dtype, device=runner.device)

    def work() -> None:
        for layer in range(len(runner.layers)):
            attention.attend(layer, step, query_TND)

    return work


def agreement(setting: Setting) -> dict[str, Any]:
    """Count how many of 16 greedy responses are equal between the engine and transformers.

    The model has four layers of the 0.5B's width in fp32, or the tiny shape with `--tiny`.
    """
    device, new_tokens = setting.device, 8 if setting.tiny else 64
    size = "tiny" if setting.tiny else "0.5B"
    layers = min(4, SIZES[size]["num_hidden_layers"])
    module: Any = build(size, torch.float32, device, num_hidden_layers=layers, initializer_range=0.1)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, SIZES[size]["vocab_size"], size=length) for length in rng.integers(5, 300, 16)]
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0)
    engine = NativeEngine(device=device, max_length=300 + new_tokens)
    engine.update_weights(SharedModule(module), 0)
    requests = [Request(str(index), 0, prompt, params) for index, prompt in enumerate(prompts)]
    written = {sample.uid: sample.token_ids.tolist() for sample in generate(engine, requests)}
    engine.sleep()
    alike = sum(
        greedy(module, prompt, new_tokens, device) == written[str(index)]
        for index, prompt in enumerate(prompts)
    )
    return {"value": alike, "new_tokens": new_tokens}


@torch.inference_mode()
def greedy(module: PreTrainedModel, prompt: np.ndarray, new_tokens: int, device: torch.device) -> list[int]:
    """Return the greedy response of transformers' own `generate`."""
    model: Any = module
    ids = torch.from_numpy(prompt).to(device)[None]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # without this mask, transformers takes token 0 for padding
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
