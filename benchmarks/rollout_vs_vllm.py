"""Compare rollout throughput of the native engine with vLLM, SGLang and transformers' `generate`, in one run.

Prompts have 32 tokens, with 16 to 192 new tokens each, sampled at temperature 1 with the log-prob of every
token. One workload has 64 prompts once, the other 256 prompts 8 times. vLLM runs in its own environment
(`make peers`), as a process that stays up, so the engines take turns within the same minutes. It has the same
weights, lengths, threads, dtype and maximum number of sequences as Tandem, and enforce_eager. Each engine is
warmed up on a few prompts. SGLang runs as in training: on a server that Tandem's engine starts, in its own
environment, with requests over HTTP. The best round counts, so other load on the machine favours no engine.
Useful tokens are the requested tokens: `generate`, which returns no log-probs, runs its padded batches until
the longest response is done.

Floors are the time of the model's matrix products alone, in Tandem's process: "full" with all rows busy at
every step, "ramp" with the rows that are really running, step by step, from the first to the last response.
Neither includes the prompts.

    python benchmarks/rollout_vs_vllm.py [--sizes 3.2M 30M 107M] [--dtypes bf16 fp32] [--workloads 64x1 256x8]
        [--engines tandem vllm sglang hf] [--quick] [--out FILE]
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.sides import Side
from rollout_vs_hf import (
    DTYPES,
    LONGEST,
    PROMPT_LENGTH,
    SHORTEST,
    SIZES,
    build,
    machine,
    matmuls,
    run_hf,
    seconds,
)
from tiny import arguments, peer
from transformers import PreTrainedModel

from tandem.device import choose_device, set_threads
from tandem.engines.rollout.base import SharedModule, WeightStream, generate
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.sglang.engine import SGLangEngine
from tandem.engines.rollout.sglang.process import serve
from tandem.protocol import Request, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "rollout_vs_vllm.json"
MAX_NUM_SEQS = 256
KV_CACHE_GIB = 4
WARM_UP_PROMPTS = 16
WORKLOADS = {"64x1": (64, 1), "256x8": (256, 8)}
QUICK = {"8x1": (8, 1), "16x2": (16, 2)}
ENGINES = ("tandem", "vllm", "sglang", "hf")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows at which the matrix products are timed; times in between are interpolated."""


def make_requests(vocabulary: int, prompts: int, n: int) -> list[Request]:
    """Make requests; the samples of a prompt have different lengths."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, vocabulary, size=PROMPT_LENGTH) for _ in range(prompts)]
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=(prompts, n))
    return [
        Request(str(row), sample, ids[row], SamplingParams(max_tokens=int(lengths[row, sample])))
        for row in range(prompts)
        for sample in range(n)
    ]


def run_tandem(module: PreTrainedModel, requests: Sequence[Request], device: torch.device) -> None:
    """Run a generation phase as in training: pass weights, make the cache, generate, free the cache."""
    engine = NativeEngine(device=device, max_length=PROMPT_LENGTH + LONGEST, max_num_seqs=MAX_NUM_SEQS)
    engine.update_weights(SharedModule(module), 0)
    samples = generate(engine, requests)
    assert [len(s.token_ids) for s in samples] == [r.params.max_tokens for r in requests]
    engine.sleep()


def run_batches(module: PreTrainedModel, requests: Sequence[Request], device: torch.device) -> None:
    for start in range(0, len(requests), MAX_NUM_SEQS):
        run_hf(module, requests[start : start + MAX_NUM_SEQS], device)


def rows_by_step(lengths: Sequence[int], most: int) -> np.ndarray:
    """Return the number of running sequences at each step, shape (S,).

    A sequence that ends is replaced at once.
    """
    ends: list[int] = []
    running = np.zeros(sum(lengths) + 1, dtype=np.int64)
    last = 0
    for length in lengths:
        start = heapq.heappop(ends) if len(ends) == most else 0
        heapq.heappush(ends, start + length)
        running[start : start + length] += 1
        last = max(last, start + length)
    return running[:last]


def floors(
    module: PreTrainedModel, lengths: Sequence[int], device: torch.device, repeats: int
) -> dict[str, float]:
    """Return the tokens/s if there were only the matrix products."""
    most = min(MAX_NUM_SEQS, len(lengths))
    grid = [rows for rows in ROWS if rows < most] + [most]
    took = []
    for rows in grid:
        step = matmuls(module, rows, device)
        took.append(min(seconds(step, device) for _ in range(5 * repeats + 1)))
    ramp = np.interp(rows_by_step(lengths, most), grid, took).sum()
    return {"full": most / took[-1], "ramp": sum(lengths) / float(ramp)}


class VLLM:
    """The peer's process with one model.

    Args:
        module: the model, whose weights the peer loads.
        dtype: the dtype of the peer.
        threads: the number of threads.
    """

    def __init__(self, module: PreTrainedModel, dtype: str, threads: int) -> None:
        log = Path(tempfile.gettempdir()) / "rollout_vs_vllm.log"
        with tempfile.TemporaryDirectory() as folder:
            module.save_pretrained(folder)
            self._side = Side(
                [str(ROOT / ".peers/vllm/bin/python"), str(ROOT / "benchmarks/peers/vllm_rollout.py")],
                log,
                OMP_NUM_THREADS=str(threads),
                VLLM_CPU_OMP_THREADS_BIND="nobind",
                VLLM_CPU_KVCACHE_SPACE=str(KV_CACHE_GIB),
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
            )
            self._side.ask(
                "open",
                model=folder,
                dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype],
                max_num_seqs=MAX_NUM_SEQS,
                max_model_len=PROMPT_LENGTH + LONGEST,
            )
        self.versions: dict[str, str] = self._side.ask("versions")

    def run(self, requests: Sequence[Request]) -> float:
        """Return the seconds from the call to the last response, measured in the peer's process."""
        took, tokens = self._side.ask(
            "generate",
            prompts=[request.prompt_ids.tolist() for request in requests],
            max_tokens=[request.params.max_tokens for request in requests],
        )
        assert tokens == [request.params.max_tokens for request in requests]
        return float(took)

    def close(self) -> None:
        self._side.close()


class SGLang:
    """Tandem's SGLang engine with one model.

    Args:
        module: the model, whose weights and dtype the server gets.
        threads: the number of threads of the server.
    """

    def __init__(self, module: PreTrainedModel, _dtype: str, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["PYTHONPATH"] = str(ROOT / "tests/support/sglang_on_cpu")
        module.config.architectures = [type(module).__name__]  # as in the folder of a model
        process = serve(
            module.config,
            log=Path(tempfile.mkdtemp(prefix="sglang-")) / "server.log",
            devices=["cpu"],
            dtype=module.dtype,
            max_length=PROMPT_LENGTH + LONGEST,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.5,
            python=str(ROOT / ".peers/sglang/bin/python"),
        )
        limits: dict[str, Any] = {"max_length": PROMPT_LENGTH + LONGEST, "max_num_seqs": MAX_NUM_SEQS}
        self._engine = SGLangEngine(Server(process.url), config=module.config, process=process, **limits)
        self.versions: dict[str, str] = {"sglang": self._engine.call("GET", "/server_info")["version"]}
        self._module = module
        self.close = self._engine.close

    def run(self, requests: Sequence[Request]) -> float:
        """Return the seconds from the call to the last response. The cached prefixes are dropped first."""
        self._engine.update_weights(WeightStream(iter(self._module.named_parameters())), 0)
        began = time.perf_counter()
        samples = generate(self._engine, requests)
        took = time.perf_counter() - began
        assert [len(s.token_ids) for s in samples] == [r.params.max_tokens for r in requests]
        return took


PEERS: dict[str, Callable[..., VLLM | SGLang]] = {"vllm": VLLM, "sglang": SGLang}


def measure(
    module: PreTrainedModel,
    requests: Sequence[Request],
    engines: Sequence[str],
    peers: Mapping[str, VLLM | SGLang],
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    """Return tokens/s of the best round of each engine, and the floors; the engines take turns."""
    runs: dict[str, Callable[[Sequence[Request]], float]] = {
        "tandem": lambda given: seconds(lambda: run_tandem(module, given, device), device),
        "hf": lambda given: seconds(lambda: run_batches(module, given, device), device),
    }
    runs |= {name: peer.run for name, peer in peers.items()}
    few = [
        replace(request, params=replace(request.params, max_tokens=SHORTEST))
        for request in requests[:WARM_UP_PROMPTS]
    ]
    for name in engines:
        runs[name](few)
    rounds = [{name: runs[name](requests) for name in engines} for _ in range(repeats)]
    lengths = [request.params.max_tokens for request in requests]
    rates = {name: sum(lengths) / min(took[name] for took in rounds) for name in engines}
    floor = floors(module, lengths, device, repeats)
    return {
        "useful_tokens": sum(lengths),
        "tokens_per_s": rates,
        "seconds_of_rounds": rounds,
        "tandem_over": {name: rates["tandem"] / rate for name, rate in rates.items() if name != "tandem"},
        "floor_tokens_per_s": floor,
        "share_of_floor": {
            name: {kind: rate / of for kind, of in floor.items()} for name, rate in rates.items()
        },
    }


def line(row: dict[str, Any]) -> str:
    parts = [f"{row['size']:>5} {row['dtype']} {row['workload']:>6}:"]
    for name, rate in row["tokens_per_s"].items():
        share = row["share_of_floor"][name]
        parts.append(
            f"{name} {rate:,.0f} tok/s ({share['ramp']:.2f} of ramp, {share['full']:.2f} of full floor)"
        )
    parts += [f"tandem / {name} {ratio:.2f}" for name, ratio in row["tandem_over"].items()]
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=[name for name in ENGINES if name != "sglang"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="only the smallest size with a few prompts; takes a minute"
    )
    parser.add_argument(
        "--out", type=Path, help=f"JSON file of the results; default {RESULTS.name}, none with --quick"
    )
    options = arguments(parser, quick=True, dtypes=["fp32"])
    set_threads(options.threads)
    device = choose_device("cpu")
    sizes, repeats, workloads = options.sizes, options.repeats, {k: WORKLOADS[k] for k in options.workloads}
    if options.quick:
        sizes, repeats, workloads = sizes[:1], 1, QUICK
    missing = {name for name in PEERS if name in options.engines and not peer(name, tiny=options.tiny)}
    engines = [name for name in ENGINES if name in {"tandem", *options.engines} - missing]
    results: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for size in sizes:
        for dtype in options.dtypes:
            module = build(size, DTYPES[dtype], device)
            peers = {
                name: start(module, dtype, options.threads)
                for name, start in PEERS.items()
                if name in engines
            }
            for side in peers.values():
                versions |= side.versions
            for workload, (prompts, n) in workloads.items():
                requests = make_requests(SIZES[size]["vocab_size"], prompts, n)
                row = measure(module, requests, engines, peers, device, repeats)
                parameters = sum(p.numel() for p in module.parameters())
                results.append(
                    {"size": size, "parameters": parameters, "dtype": dtype, "workload": workload, **row}
                )
                print(line(results[-1]), flush=True)
            for side in peers.values():
                side.close()
    out = options.out or (None if options.quick else RESULTS)
    if out is not None:
        report = {
            "benchmark": "rollout_vs_vllm",
            "machine": machine(device),
            "peer": versions,
            "max_num_seqs": MAX_NUM_SEQS,
            "results": results,
        }
        out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
