"""Measure the time and memory of advantage estimators on a CPU, against verl 0.9.1.

Both sides get the same batch. All responses have the same length, so Tandem cannot save padding. In some
cases a part of the tokens (the percentage after the shape) comes from a tool. Each side runs in its own
process. The sides take turns, and the medians are compared. `spread` is the range of the ratios of single
turns. `of CPU` is the ratio of processor time over all threads, which other programs disturb less. `extra` is
the peak of resident memory minus the memory before the first call, results included, as a multiple of the
size of the columns that the estimator reads.

    python benchmarks/advantages.py [--rounds 7] [--cases gae rloo ...] [--threads 1] [--out FILE]

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
from typing import Any, NamedTuple

import torch
from peers.advantage_common import AdvantageSide, Columns
from peers.sides import Side, serve
from tiny import arguments, peer
from torch import Tensor

import tandem.algorithms  # noqa: F401  (registers the estimators)
from tandem.algorithms.registry import advantage_estimator

HERE = Path(__file__).resolve().parent
VERL = HERE.parent / ".peers" / "verl" / "bin" / "python"


class Case(NamedTuple):
    """One row of the table.

    Attributes:
        name: verl's name of the estimator.
        options: the estimator's options.
        samples, tokens: the shape of the batch.
        holes: the share of tokens that come from a tool.
    """

    name: str
    options: dict[str, Any]
    samples: int
    tokens: int
    holes: float = 0.0


CASES = (
    *(
        Case("gae", {"gamma": 1.0, "lam": 0.95}, samples, tokens, holes)
        for holes in (0.0, 0.1)
        for samples, tokens in ((64, 32_768), (256, 8192))
    ),
    Case("reinforce_plus_plus", {"gamma": 0.99}, 256, 8192),
    *(
        Case(name, {}, 4096, tokens)
        for tokens in (64, 1024)
        for name in (
            "grpo",
            "grpo_vectorized",
            "grpo_passk",
            "gdpo",
            "rloo",
            "rloo_vectorized",
            "opo",
            "gpg",
            "reinforce_plus_plus_baseline",
            "remax",
        )
    ),
    Case("optimal_token_baseline", {}, 4096, 64),
    Case("tir_optimal_token_baseline", {}, 4096, 64),
)
GROUP = 8
HEADINGS = (
    ("shape", 48),
    ("tandem ms", 10),
    ("verl ms", 10),
    ("ratio", 8),
    ("of CPU", 8),
    ("spread", 16),
    ("extra", 8),
    ("verl", 8),
)


def ragged(columns: Columns) -> Columns:
    """Convert padded columns to flat values with offsets."""
    samples, tokens = columns["response_mask"].shape
    flat = {
        name: column.flatten() if column.shape == (samples, tokens) else column
        for name, column in columns.items()
    }
    offsets = torch.arange(samples + 1) * tokens
    return flat | {"response_mask": flat["response_mask"].bool(), "offsets": offsets}


def estimate(name: str, columns: Columns, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return advantage_estimator(name)(columns, **options)


def input_bytes(case: Case) -> int:
    """Return the bytes of the columns that the estimator reads, with Tandem's data types."""
    tokens, samples = case.samples * case.tokens, case.samples
    sizes = {
        "response_mask": tokens,
        "offsets": 8 * samples,
        "group": 8 * samples,
        "reward_baselines": 4 * samples,
        "reward_components": 12 * samples,
    }
    return sum(sizes.get(name, 4 * tokens) for name in advantage_estimator(case.name).columns)


def start(name: str, folder: Path) -> Side:
    own = [sys.executable, __file__, "--side"]
    command = [str(VERL), str(HERE / "peers" / "verl_advantages.py")] if name == "verl" else own
    return Side(command, folder / f"{name}.log")


def measure(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    sides = {name: start(name, folder) for name in options.sides}
    arguments = {"name": case.name, "options": case.options}
    batch = {"samples": case.samples, "tokens": case.tokens, "holes": case.holes}
    batch |= {"group": GROUP, "threads": options.threads}
    found: dict[str, Any] = case._asdict() | {"input_bytes": input_bytes(case)}
    for name, side in sides.items():
        version = side.ask("open", **batch)
        found[name] = {"version": version} | side.ask("first", **arguments)
    turns = [
        {name: side.ask("seconds", **arguments) for name, side in sides.items()}
        for _ in range(options.rounds)
    ]
    for name, side in sides.items():
        side.close()
        found[name]["seconds"], found[name]["cpu_seconds"] = (
            statistics.median(turn[name][index] for turn in turns) for index in (0, 1)
        )
    if "verl" not in sides:
        return found
    ratios = [turn["verl"][0] / turn["tandem"][0] for turn in turns]
    return found | {"ratio": statistics.median(ratios), "spread": (min(ratios), max(ratios))}


def report(found: dict[str, Any]) -> str:
    tandem, verl = found["tandem"], found.get("verl")
    if verl is None:
        return f"{found['name']:<30}{1e3 * tandem['seconds']:>28.2f} ms"
    low, high = found["spread"]
    cpu = verl["cpu_seconds"] / tandem["cpu_seconds"]
    shape = f"({found['samples']}, {found['tokens']}) {found['holes']:.0%}"
    extra = (side["extra_bytes"] / found["input_bytes"] for side in (tandem, verl))
    alike = abs(tandem["projection"] - verl["projection"]) <= 1e-3 * max(1.0, abs(verl["projection"]))
    return (
        f"{found['name']:<30}{shape:>18}{1e3 * tandem['seconds']:>10.2f}{1e3 * verl['seconds']:>10.1f}"
        f"{found['ratio']:>8.1f}{cpu:>8.1f}{f'{low:.1f} to {high:.1f}':>16}"
        f"{''.join(f'{times:>8.1f}' for times in extra)}"
        f"  {'same' if alike else 'DIFFERENT'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=sorted({case.name for case in CASES}))
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = arguments(parser, rounds=1, cases=["grpo"])
    if options.side:
        serve(AdvantageSide(estimate, "tandem", ragged).methods())
        return
    options.sides = ["tandem", *(["verl"] if peer("verl", tiny=options.tiny) else [])]
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    if options.tiny:
        cases = [case._replace(samples=16, tokens=32) for case in cases[:1]]
    names = "".join(f"{name:>{width}}" for name, width in HEADINGS)
    print(names)
    rows = []
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, options, Path(folder)))
        print(report(rows[-1]), flush=True)
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "load": os.getloadavg()[0],
        "command": " ".join(["python benchmarks/advantages.py", *sys.argv[1:]]),
    }
    if options.out is not None:
        options.out.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
