"""Compare rollout throughput of the native engine with transformers' `generate`, in one run.

There are 64 prompts of 32 tokens with 16 to 192 new tokens each, sampled at temperature 1. Useful tokens are
the requested tokens: `generate` runs its padded batch until the longest response is done. Each engine is
warmed up once, and then the engines take turns. The best of the repeats counts, so other load on the machine
favours neither. The floor is the time of the model's matrix products alone, measured with the full batch for
every decode step.

    python benchmarks/rollout_vs_hf.py [--sizes 3.2M 107M] [--dtypes bf16 fp32] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny import arguments
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tandem.device import choose_device, set_threads
from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.models.linear import linear
from tandem.protocol import Request, SamplingParams

PROMPTS, PROMPT_LENGTH, SHORTEST, LONGEST = 64, 32, 16, 192
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES: dict[str, dict[str, Any]] = {
    "3.2M": {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "30M": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "107M": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}
HEADER = "  size dtype   tandem tok/s   generate tok/s   ratio   matmul floor   share"
LINE = (
    "{size:>6} {dtype:>5} {tandem_tokens_per_s:>14,.0f} {hf_generate_tokens_per_s:>16,.0f} {ratio:>7.2f}"
    " {matmul_floor_tokens_per_s:>14,.0f} {share_of_floor:>7.2f}"
)


def build(size: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES[size], max_position_embeddings=1024, tie_word_embeddings=True)
    model: Any = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    return model.to(device=device, dtype=dtype).eval()  # type: ignore[no-any-return]


def make_requests(vocabulary: int, longest: int) -> list[Request]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(SHORTEST, longest + 1, size=PROMPTS)
    return [
        Request(
            str(index), 0, rng.integers(0, vocabulary, size=PROMPT_LENGTH), SamplingParams(max_tokens=int(n))
        )
        for index, n in enumerate(lengths)
    ]


def run_native(module: PreTrainedModel, requests: Sequence[Request], device: torch.device) -> None:
    """Run a generation phase as in training: pass weights, make the cache, generate, free the cache."""
    engine = NativeEngine(device=device, max_length=PROMPT_LENGTH + LONGEST)
    engine.update_weights(SharedModule(module), 0)
    generate(engine, requests)
    engine.sleep()


def run_hf(module: Any, requests: Sequence[Request], device: torch.device) -> None:
    ids = torch.from_numpy(np.stack([request.prompt_ids for request in requests])).to(device)
    longest = max(request.params.max_tokens for request in requests)
    with torch.inference_mode():
        module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
        )


def matmuls(module: nn.Module, rows: int, device: torch.device) -> Callable[[], None]:
    """Return a function with the products of one decode step with the model's weight matrices."""
    weights: list[Tensor] = [part.weight.detach() for part in module.modules() if isinstance(part, nn.Linear)]
    inputs = [torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=device) for weight in weights]

    def step() -> None:
        for weight, x in zip(weights, inputs, strict=True):
            linear(x, weight, None)

    return step


def seconds(work: Callable[[], None], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def measure(size: str, dtype_name: str, device: torch.device, repeats: int, longest: int) -> dict[str, Any]:
    module = build(size, DTYPES[dtype_name], device)
    requests = make_requests(SIZES[size]["vocab_size"], longest)
    step = matmuls(module, PROMPTS, device)
    engines = {
        "tandem": lambda: run_native(module, requests, device),
        "hf_generate": lambda: run_hf(module, requests, device),
        "matmul_step": step,
    }
    best = dict.fromkeys(engines, float("inf"))
    for repeat in range(repeats + 1):
        for name, work in engines.items():
            for _ in range(20 if name == "matmul_step" else 1):
                took = seconds(work, device)
                best[name] = min(best[name], took) if repeat else best[name]  # the first round is the warm-up
    useful = sum(request.params.max_tokens for request in requests)
    rates = {name: useful / best[name] for name in ("tandem", "hf_generate")}
    floor = PROMPTS / best["matmul_step"]
    return {
        "size": size,
        "parameters": sum(p.numel() for p in module.parameters()),
        "dtype": dtype_name,
        "useful_tokens": useful,
        **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
        "ratio": rates["tandem"] / rates["hf_generate"],
        "matmul_floor_tokens_per_s": floor,
        "share_of_floor": rates["tandem"] / floor,
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def machine(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    options = arguments(parser, sizes=["3.2M"], dtypes=["fp32"], repeats=1, device="cpu")
    set_threads(options.threads)
    device = choose_device(options.device)
    results = []
    print(HEADER)
    for size in options.sizes:
        for dtype in options.dtypes:
            row = measure(size, dtype, device, options.repeats, SHORTEST if options.tiny else LONGEST)
            results.append(row)
            print(LINE.format(**row), flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"benchmark": "rollout_vs_hf", "machine": machine(device), "results": results}
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
