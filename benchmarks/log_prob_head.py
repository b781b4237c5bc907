"""Compare heads that compute log-probs and entropies from hidden states, in bfloat16 on a CPU.

Each head runs forward and backward. The results are seconds, and the memory in addition to the weight's own
gradient.

tandem   The head of `tandem.models.heads`, in tiles of the vocabulary.
full     All logits at once, in the plain way: product, float32, log-softmax, gather, sum of p log p.
verl     verl 0.9.1's fused linear layer for PPO, in chunks of 512 positions.

Each side runs in its own process. The sides take turns, and the medians are compared: wall-clock time, and
processor time over all threads, which other programs disturb less (with `--threads 1`). The floor of the
tiles is the time of their 8 M D V operations (2 forward, 2 to recompute the logits, 4 for the gradients), at
the rate of one product hidden weightᵀ measured in the same run. With all logits at once it would be 6 M D V.

    python benchmarks/log_prob_head.py [--tokens 1024] [--hidden 896] [--vocabulary 151936] [--out FILE]

verl runs in its own environment; create it with `make peers`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peers.head_common import Head, HeadSide
from peers.sides import Side, serve
from tiny import arguments, peer
from torch import Tensor

from tandem.models.heads import token_log_probs

HERE = Path(__file__).resolve().parent
VERL = HERE.parent / ".peers" / "verl" / "bin" / "python"
SIDES = ("tandem", "full", "verl")


def in_tiles(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs, entropy = token_log_probs(hidden, weight, targets, temperature=temperature, with_entropy=True)
    assert entropy is not None
    return log_probs, entropy


def at_once(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax((hidden @ weight.T).float() / temperature, -1)
    log_probs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    return log_probs, -(log_p.exp() * log_p).sum(-1)


HEADS: dict[str, Head] = {"tandem": in_tiles, "full": at_once}


def start(name: str, folder: Path) -> Side:
    own = [sys.executable, __file__, "--side", name]
    command = [str(VERL), str(HERE / "peers" / "verl_log_prob_head.py")] if name == "verl" else own
    return Side(command, folder / f"{name}.log")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sizes = {name: getattr(options, name) for name in ("tokens", "hidden", "vocabulary", "temperature")}
    sides = {name: start(name, folder) for name in options.sides}
    found: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        version = side.ask("open", **sizes, threads=options.threads)
        found[name] = {"torch": version} | side.ask("first", rows=4)
    products = [sides["tandem"].ask("product_seconds") for _ in range(3)]
    turns = [{name: side.ask("seconds") for name, side in sides.items()} for _ in range(options.rounds)]
    for name, side in sides.items():
        side.close()
        for index, kind in enumerate(("seconds", "cpu_seconds")):
            found[name][kind] = statistics.median(turn[name][index] for turn in turns)
    operations = 2 * options.tokens * options.hidden * options.vocabulary
    product, product_cpu = (min(times) for times in zip(*products, strict=True))
    return {
        "sizes": sizes,
        "sides": found,
        "product_gflops": operations / product / 1e9,
        "floor_s": 4 * product,
        "floor_cpu_s": 4 * product_cpu,
    }


def report(found: dict[str, Any]) -> None:
    tandem = found["sides"]["tandem"]
    print(f"{'side':<8}{'seconds':>9}{'tandem /':>9}{'CPU s':>9}{'tandem /':>9}{'extra MB':>10}  errors")
    for name, side in found["sides"].items():
        times = "".join(f"{side[k]:>9.3f}{tandem[k] / side[k]:>9.2f}" for k in ("seconds", "cpu_seconds"))
        errors = f"{side['log_prob_error']:.1e} {side['entropy_error']:.1e}"
        print(f"{name:<8}{times}{side['extra_bytes'] / 1e6:>10.0f}  {errors}")
    print(f"floor of the tiles: {found['floor_s']:.3f} s, {found['floor_cpu_s']:.3f} CPU s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    parser.add_argument("--side", choices=list(HEADS), help=argparse.SUPPRESS)
    options = arguments(parser, tokens=16, hidden=32, vocabulary=256, rounds=1)
    if options.side is not None:
        serve(HeadSide(HEADS[options.side]).methods())
        return
    if "verl" in options.sides and not peer("verl", tiny=options.tiny):
        options.sides = [name for name in options.sides if name != "verl"]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    found["machine"] = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "load": os.getloadavg()[0],
        "command": " ".join(["python benchmarks/log_prob_head.py", *sys.argv[1:]]),
    }
    report(found)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
