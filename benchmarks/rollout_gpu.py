"""Decoding on a GPU by the native engine, against the roofline of the device.

Qwen2.5 shapes with random weights in bfloat16. A decode step of a batch at one context length is run as the
engine runs it: forward by CUDA graph, then the draw of the tokens. Its floor is the larger of two times:
the bytes it must read (every matrix once, every sequence's keys and values once) at the device's memory
bandwidth, and its operations at the device's peak; the share is the floor over the time taken. The forward
is timed without the graph too, and the attention alone. Batches whose cache does not fit are left out.

First, small float32 models are decoded greedily, and what they write is compared with what transformers'
`generate` writes.

    python benchmarks/rollout_gpu.py [--quick] [--sizes 0.5B 1.5B 7B] [--batches 64 256 512]
                                     [--contexts 1024 4096 14336] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tandem.device import choose_device
from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.draws.sampler import RowParams, sample
from tandem.engines.rollout.native.attention import Attention, make_attention
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.graphs import GraphedRunner
from tandem.engines.rollout.native.paged import PagedCache, StepInput, bytes_per_token
from tandem.engines.rollout.native.runner import Runner, make_runner
from tandem.protocol import Request, SamplingParams

BLOCK_SIZE = 16
QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "tie_word_embeddings": True,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "0.5B": QWEN
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "7B": {
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}
# Bytes/s of memory and dense bfloat16 operations/s, from the makers' data sheets; the first name that fits.
PEAKS = {
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100": (3.35e12, 989e12),
    "B200": (8.0e12, 2250e12),
    "A100-SXM4-80GB": (2.04e12, 312e12),
    "A100": (1.56e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "RTX 4090": (1.01e12, 165e12),
}
HEADER = " size  batch context   step ms   eager   sample  attention      tok/s   floor ms   share  KV GB/s"
LINE = (
    "{size:>5} {batch:>6} {context:>7} {step_ms:>9.3f} {eager_ms:>7.3f} {sample_ms:>8.3f}"
    " {attention_ms:>10.3f} {tokens_per_s:>10,.0f} {floor_ms:>10.3f}"
    " {share_of_floor:>7.2f} {attention_gb_per_s:>8,.0f}"
)  # fmt: skip


def build(size: str, dtype: torch.dtype, device: torch.device, **overrides: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES[size] | overrides, max_position_embeddings=32768, use_cache=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)
    return model.to(dtype).eval()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Floor:
    """What a decode step must read and compute.

    Attributes:
        weight_bytes: of every matrix; an embedding that is not the output head as well is not read.
        kv_bytes: of all keys and values seen.
        operations: a multiplication and an addition are two.
    """

    weight_bytes: int
    kv_bytes: int
    operations: int

    @classmethod
    def of(cls, module: PreTrainedModel, runner: Runner, batch: int, context: int) -> Floor:
        config: Any = module.config
        embedding: Any = module.get_input_embeddings()
        parameters = sum(p.numel() for p in module.parameters())
        if not config.tie_word_embeddings:
            parameters -= embedding.weight.numel()
        head_dim = config.hidden_size // config.num_attention_heads
        per_column = 4 * config.num_attention_heads * head_dim * config.num_hidden_layers
        return cls(
            weight_bytes=parameters * runner.dtype.itemsize,
            kv_bytes=batch * context * bytes_per_token(runner.layers, runner.dtype),
            operations=batch * (2 * parameters + per_column * context),
        )

    def seconds(self, bandwidth: float, peak: float) -> float:
        return max((self.weight_bytes + self.kv_bytes) / bandwidth, self.operations / peak)


def peaks(device: torch.device) -> tuple[float, float, str]:
    """(bytes/s, operations/s, where they are from); measured where no data sheet is at hand."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, (bandwidth, operations) in PEAKS.items():
            if known in name:
                return bandwidth, operations, f"data sheet of {known}"
    source = torch.ones(2**26, device=device)
    target = torch.empty_like(source)
    copied = seconds(lambda: target.copy_(source), device, 5)
    square = torch.ones(1024, 1024, dtype=torch.bfloat16, device=device)
    multiplied = seconds(lambda: square @ square, device, 5)
    return 2 * source.numel() * 4 / copied, 2 * 1024**3 / multiplied, "measured: a copy and a product"


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of a run of the work, after three to warm up."""
    times = []
    for repeat in range(repeats + 3):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= 3:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def decode_step(batch: int, context: int, vocabulary: int, device: torch.device) -> StepInput:
    """One token of each of `batch` sequences that have `context` tokens with it, in scattered blocks."""
    generator = torch.Generator().manual_seed(0)
    width = -(-context // BLOCK_SIZE)
    tables_SB = torch.randperm(batch * width, generator=generator).view(batch, width)
    position = context - 1
    slots_T = tables_SB[:, -1] * BLOCK_SIZE + position % BLOCK_SIZE
    return StepInput(
        ids_T=torch.randint(vocabulary, (batch,), generator=generator).to(device),
        positions_T=torch.full((batch,), position, device=device),
        slots_T=slots_T.to(device),
        starts_S1=torch.arange(batch + 1, dtype=torch.int32, device=device),
        lengths_S=torch.full((batch,), context, dtype=torch.int32, device=device),
        tables_SB=tables_SB.int().to(device),
        logits_L=torch.arange(batch, device=device),
        max_query=1,
        max_length=context,
    )


def fits(needed: int, device: torch.device) -> bool:
    """Whether the cache leaves a tenth of the free memory for everything else."""
    if device.type != "cuda":
        return needed < 2**31
    torch.cuda.empty_cache()
    return needed < 0.9 * torch.cuda.mem_get_info(device)[0]


def all_attention(runner: Runner, attention: Attention, step: StepInput, heads: int) -> Callable[[], None]:
    """The attention of every layer, without the rest."""
    shape = runner.layers[0]
    query_TND = torch.randn(len(step.ids_T), heads, shape.key_dim, dtype=runner.dtype, device=runner.device)

    def work() -> None:
        for layer in range(len(runner.layers)):
            attention.attend(layer, step, query_TND)

    return work


@torch.inference_mode()
def measure(
    size: str, module: PreTrainedModel, batch: int, context: int, roof: tuple[float, float], repeats: int
) -> dict[str, Any] | None:
    device = next(module.parameters()).device
    runner = make_runner("auto", module, context)
    blocks = batch * -(-context // BLOCK_SIZE)
    floor = Floor.of(module, runner, batch, context)
    if not fits(blocks * BLOCK_SIZE * bytes_per_token(runner.layers, runner.dtype), device):
        return None
    cache = PagedCache(runner.layers, blocks, BLOCK_SIZE, runner.dtype, device)
    for part in (*cache.keys, *cache.values):
        part.normal_()
    attention = make_attention(cache)
    config: Any = module.config
    step = decode_step(batch, context, config.vocab_size, device)
    forward: Runner = runner
    if device.type == "cuda":
        forward = GraphedRunner(runner, attention, batch, step.tables_SB.shape[1])
    ones, zeros = np.ones(batch), np.zeros(batch)
    params = RowParams.of(ones, zeros.astype(np.int64), ones, zeros, config.vocab_size, device)
    uniforms_R = torch.rand(batch, dtype=torch.float64, device=device)
    logits = forward.forward(step, attention)

    def whole() -> Tensor:
        return sample(forward.forward(step, attention), uniforms_R, params).tokens_R

    took = seconds(whole, device, repeats)
    attended = seconds(all_attention(runner, attention, step, config.num_attention_heads), device, repeats)
    least = floor.seconds(*roof)
    return {
        "size": size,
        "batch": batch,
        "context": context,
        "step_ms": 1e3 * took,
        "eager_ms": 1e3 * seconds(lambda: runner.forward(step, attention), device, repeats),
        "sample_ms": 1e3 * seconds(lambda: sample(logits, uniforms_R, params), device, repeats),
        "attention_ms": 1e3 * attended,
        "attention_gb_per_s": floor.kv_bytes / attended / 1e9,
        "tokens_per_s": batch / took,
        "floor_ms": 1e3 * least,
        "share_of_floor": least / took,
        "weight_bytes": floor.weight_bytes,
        "kv_bytes": floor.kv_bytes,
        "operations": floor.operations,
    }


def greedy_agreement(device: torch.device, new_tokens: int) -> dict[str, Any]:
    """A four-layer model of the 0.5B's width in float32 (of the tiny shape without a GPU): how many of 16
    greedy responses the engine and `generate` write alike."""
    size = "0.5B" if device.type == "cuda" else "tiny"
    module: Any = build(size, torch.float32, device, num_hidden_layers=4, initializer_range=0.1)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, SIZES[size]["vocab_size"], size=length) for length in rng.integers(5, 300, 16)]
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0)
    engine = NativeEngine(device=device, max_length=300 + new_tokens)
    engine.update_weights(SharedModule(module), 0)
    requests = [Request(str(index), 0, prompt, params) for index, prompt in enumerate(prompts)]
    written = {sample.uid: sample.token_ids.tolist() for sample in generate(engine, requests)}
    engine.sleep()
    alike = 0
    for index, prompt in enumerate(prompts):
        ids = torch.from_numpy(prompt).to(device)[None]
        with torch.inference_mode():
            out = module.generate(
                ids,
                attention_mask=torch.ones_like(ids),  # or it takes token 0 for padding
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
            )
        alike += out[0, len(prompt) :].tolist() == written[str(index)]
    return {"responses": len(prompts), "new_tokens": new_tokens, "alike": alike}


def versions(device: torch.device) -> dict[str, Any]:
    triton = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="0.5B, batch 64 and 256, contexts 1k and 4k")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 512])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096, 14336])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="also write the results here, as JSON")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.batches, options.contexts = ["0.5B"], [64, 256], [1024, 4096]
    device = choose_device(options.device)
    bandwidth, operations, source = peaks(device)
    print(f"{bandwidth / 1e9:,.0f} GB/s, {operations / 1e12:,.1f} TFLOP/s ({source})")
    agreement = greedy_agreement(device, new_tokens=64)
    print(
        "greedy: {alike} of {responses} responses as transformers' generate writes them".format(**agreement)
    )
    print(HEADER)
    results = []
    for size in options.sizes:
        module = build(size, torch.bfloat16, device)
        for batch in options.batches:
            for context in options.contexts:
                row = measure(size, module, batch, context, (bandwidth, operations), options.repeats)
                if row is None:
                    print(f"{size:>5} {batch:>6} {context:>7}   the cache does not fit")
                    continue
                results.append(row)
                print(LINE.format(**row), flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "benchmark": "rollout_gpu",
            "command": " ".join(sys.argv),
            "machine": versions(device),
            "roof": {"bytes_per_s": bandwidth, "operations_per_s": operations, "from": source},
            "greedy": agreement,
            "results": results,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
