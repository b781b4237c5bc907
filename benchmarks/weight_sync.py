"""Measure the weight sync from training to generation: seconds, extra memory, the share of digests.

    python benchmarks/weight_sync.py [--ranks 2] [--hidden 512] [--layers 8] [--bucket-mib 16] [--device cpu]

An actor on FSDP2 over `--ranks` processes transfers its weights (fp32 parameters, sent in bf16) in three
ways: its own module unsharded in place, a stream of whole tensors, and buckets in host memory. On CUDA each
rank has its own device, and memory means device memory. Each way is timed without the digests of both sides,
and the digests are timed alone. Extra memory is the peak of resident memory during the transfer minus the
memory before it. The bound for the stream and the buckets is the largest unit that FSDP gathers (a layer, or
the embedding) plus one bucket. The bound for the module is the weights in bf16 plus one unit and its shard.
On a CPU, gloo first gathers into its own buffer, which adds one more unit. The results go to
benchmarks/results/weight_sync.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device.rates import synchronize
from tiny import arguments
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.device import choose_device
from tandem.engines.train.fsdp import FSDPEngine
from tandem.engines.weight_sync import Digest, buckets, digest
from tandem.models.parallel import leave_distributed

RESULTS = Path(__file__).with_name("results") / "weight_sync.json"
DTYPE = torch.bfloat16
MIB = 2**20


def make_model(folder: Path, hidden: int, layers: int) -> None:
    config = Qwen2Config(
        vocab_size=16384,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_engine(folder: Path, device: torch.device) -> FSDPEngine:
    return FSDPEngine(
        folder,
        model=BackboneConfig(path=str(folder)),
        fsdp=FSDPConfig(model_dtype="fp32", dtype="bf16"),
        optim=OptimConfig(),
        total_steps=1,
        device=device,
    )


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak of memory during a call minus the memory before it (device, or resident on Linux)."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - held
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(kind: str) -> int:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))


def seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the best time of several calls, with all ranks together."""
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


class Ways:
    """The ways to transfer the weights of one engine."""

    def __init__(self, engine: FSDPEngine, bucket: int) -> None:
        self.engine = engine
        sizes = {name: shape.numel() * DTYPE.itemsize for name, shape in engine.weight_shapes.items()}
        self.packed = buckets(sizes, bucket)
        self.bytes = sum(sizes.values())
        self.layer = max(self.bytes_of(sizes, f"model.layers.{i}.") for i in range(1000))
        self.unit = max(self.layer, *sizes.values())
        self.bucket = max(sum(sizes[name] for name in names) for names in self.packed)

    @staticmethod
    def bytes_of(sizes: dict[str, int], prefix: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefix))

    def shards(self) -> Digest:
        return self.engine.digest()

    def module(self) -> Digest:
        with self.engine.unsharded() as module:
            return digest(module.named_parameters())

    def module_alone(self) -> None:
        with self.engine.unsharded():
            pass

    def stream(self) -> None:
        for _ in self.engine.weights(dtype=DTYPE):
            pass

    def in_buckets(self) -> None:
        """Transfer the weights with one bucket at a time in host memory of the first rank."""
        for names in self.packed:
            held = [value.to("cpu") for _, value in self.engine.weights(dtype=DTYPE, names=names)]
            del held

    def check(self) -> None:
        assert self.module() == self.shards() == digest(self.engine.weights(dtype=DTYPE))


def measure(folder: Path, bucket: int, repeats: int, device: torch.device) -> dict[str, Any]:
    ways = Ways(make_engine(folder, device), bucket)
    ways.check()
    shards, module = (seconds(run, repeats, device) for run in (ways.shards, ways.module))
    alone = seconds(ways.module_alone, repeats, device)
    held = max(module - alone, 0.0)
    shard = ways.unit // dist.get_world_size()
    runs = {
        "module": (ways.module_alone, ways.bytes + ways.unit + shard),
        "stream": (ways.stream, ways.unit + ways.bucket),
        "buckets": (ways.in_buckets, ways.unit + ways.bucket),
    }
    found: dict[str, Any] = {
        "parameters_bytes": ways.bytes,
        "largest_unit_bytes": ways.unit,
        "bucket_bytes": ways.bucket,
        "gloo_buffer_bytes": ways.unit if device.type == "cpu" else 0,
        "bucket_count": len(ways.packed),
        "digest_of_shards_s": shards,
        "digest_of_module_s": held,
    }
    for name, (run, bound) in runs.items():
        transfer = seconds(run, repeats, device)
        found[name] = {
            "seconds": transfer,
            "digest_share": (shards + held) / (transfer + shards + held),
            "extra_peak_bytes": max(peak_bytes(run, device) for _ in range(repeats)),
            "bound_bytes": bound,
        }
    return found


def launch(options: argparse.Namespace) -> None:
    devices = torch.cuda.device_count()
    if choose_device(options.device).type == "cuda" and devices < options.ranks:
        sys.exit(f"--ranks {options.ranks} needs {options.ranks} CUDA devices; this machine has {devices}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.hidden, options.layers)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        job = [str(options.ranks), __file__, "--folder", folder, *sys.argv[1:]]
        threads = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"}
        subprocess.run([*words, *job], env=os.environ | threads, check=True)


def report(found: dict[str, Any]) -> None:
    print(f"{found['parameters_bytes'] / MIB:.0f} MiB of weights in bf16, {found['ranks']} ranks")
    print(f"{'way':<10} {'seconds':>8} {'digests':>8} {'extra MiB':>10} {'bound MiB':>10}")
    for name in ("module", "stream", "buckets"):
        row = found[name]
        extra, bound = row["extra_peak_bytes"] / MIB, row["bound_bytes"] / MIB
        print(f"{name:<10} {row['seconds']:>8.3f} {row['digest_share']:>8.1%} {extra:>10.1f} {bound:>10.1f}")
    if found["gloo_buffer_bytes"]:
        print(
            f"(gloo's own buffer, {found['gloo_buffer_bytes'] / MIB:.0f} MiB, is not included in the bound)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = arguments(parser, hidden=64, layers=1, repeats=1)
    if options.folder is None:
        launch(options)
        return
    device = choose_device(options.device)
    found = measure(options.folder, options.bucket_mib * MIB, options.repeats, device)
    found["ranks"] = dist.get_world_size()
    found["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "device": device.type,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "command": " ".join(["python benchmarks/weight_sync.py", *sys.argv[3:]]),
    }
    if dist.get_rank() == 0:
        report(found)
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    leave_distributed(together=True)


if __name__ == "__main__":
    main()
