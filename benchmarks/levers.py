"""Measure what each lever of the training engine does to the gradient, to memory and to speed.

The table has every lever, and all pairs of levers that make sense.

Gradient: the relative difference to the plain path, in float64, fp32 and bf16, for a small model with
sequences of different lengths. The plain path has one rank and packed sequences in one micro-batch, without
recomputation, offload or splitting. Its own gradient is compared with transformers' model, one sequence at a
time with all logits. The bounds are 1e-9 in float64 and 1e-5 in fp32. In bf16 the bound is twice the distance
of the plain path to float64, because two results that each have this rounding error may differ by that much.
On a CPU, activations that would leave the device are really copied, from host memory to host memory.

Memory and speed: an update of a larger model, in fp32 on a CPU and in bf16 on a GPU. Peak memory is that of a
step, without parameters and optimizer state ("state"). On a GPU it comes from the caching allocator. On a CPU
it is the sum of all allocations and releases that PyTorch's allocator reports to its profiler. Resident
memory also includes memory of libraries outside tensors, and freed memory that the C library keeps. It is
measured too, in a separate process for each row, and the program compares both at the end. "moves" is the
number of bytes that the lever moves off the device, or would move on a CPU. Each process computes in one
thread, so rows with one, two and four ranks are alike. Compare speeds only between rows with the same number
of ranks.

    python benchmarks/levers.py [--only NAME ...] [--device cpu | cuda] [--quick] [--no-pairs] [--out FILE]

Other rows of an existing output file are kept. The program ends with an error if a row misses its bound or
fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from lever_rows import PRECISIONS, Options, RowFailed, measure, reference, save_models
from tiny import arguments

HERE = Path(__file__).resolve().parent
BOUNDS = {"fp64": 1e-9, "fp32": 1e-5}
ROUNDINGS = 2.0
"""The bound in bf16, as a multiple of the plain path's own error in bf16."""


@dataclass(frozen=True)
class Lever:
    """One row of the table.

    Attributes:
        name: the name in the table.
        axis: levers of one axis exclude each other and form no pair.
        options: keys of the model, of fsdp_config and of optim, by section; "micro" has arguments of
            `MicroBatching`, "engine" further arguments of the engine.
        ranks: how many ranks the lever needs.
        splits: whether the ranks of another lever in a pair multiply with these ranks.
        pairs: whether the lever is combined with others.
        excludes: axes with which the lever cannot be combined.
        against: the row whose gradient the lever must have; None if the lever has a gradient of its own,
            which its pairs must have.
        needs: required packages, or "cuda".
        precisions: the precisions in which the gradient is compared.
    """

    name: str
    axis: str
    options: Options = field(default_factory=dict)
    ranks: int = 1
    splits: bool = False
    pairs: bool = True
    excludes: tuple[str, ...] = ()
    against: str | None = "plain"
    needs: tuple[str, ...] = ()
    precisions: tuple[str, ...] = tuple(PRECISIONS)


def recompute(mode: str, **more: Any) -> Options:
    return {"model": {"enable_gradient_checkpointing": True, "gradient_checkpointing_mode": mode, **more}}


def moves(mode: str) -> Options:
    return {"model": {"enable_activation_offload": True, "activation_offload_mode": mode}}


def head(backend: str) -> Options:
    return {"model": {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": backend}}}


def optimizer(name: str) -> Options:
    return {"optim": {"optimizer": name}}


def fsdp(**options: Any) -> Options:
    return {"fsdp": options}


LIGER = ("liger_kernel", "cuda")
PLAIN = Lever("plain", "", pairs=False, against="transformers")
LEVERS = (
    Lever("padded", "layout", {"model": {"use_remove_padding": False}}),
    Lever("two samples", "cut", {"micro": {"max_samples": 2}}),
    Lever("token budget", "cut", {"micro": {"max_tokens": 400}}, pairs=False),
    Lever("recompute full", "recompute", recompute("full")),
    Lever("recompute first", "recompute", recompute("first", gradient_checkpointing_layers=2), pairs=False),
    Lever("recompute every", "recompute", recompute("every", gradient_checkpointing_layers=2), pairs=False),
    Lever("recompute ops", "recompute", recompute("ops")),
    Lever("activations async", "activations", moves("async")),
    Lever("activations sync", "activations", moves("sync"), pairs=False),
    Lever("head triton", "head", head("triton"), needs=("triton", "cuda")),
    Lever("head liger", "head", head("liger"), pairs=False, needs=LIGER, precisions=("fp32", "bf16")),
    Lever("liger layers", "layers", {"model": {"use_liger": True}}, needs=LIGER, precisions=("fp32", "bf16")),
    Lever("state offload", "state", fsdp(param_offload=True, optimizer_offload=True), pairs=False),
    Lever("adamw foreach", "optimizer", {"optim": {"fused": False}}, pairs=False),
    Lever("adamw_8bit", "optimizer", optimizer("adamw_8bit"), pairs=False, needs=("torchao",)),
    Lever("adamw_cpu", "optimizer", optimizer("adamw_cpu"), pairs=False),
    Lever("muon", "optimizer", optimizer("muon"), pairs=False),
    Lever("sharded", "sharding", ranks=2, pairs=False),
    Lever("prefetch", "sharding", fsdp(forward_prefetch=True), ranks=2),
    Lever("no reshard", "sharding", fsdp(reshard_after_forward=False), ranks=2),
    Lever("copies", "sharding", fsdp(fsdp_size=1), ranks=2),
    Lever("hybrid 2x2", "sharding", fsdp(fsdp_size=2), ranks=4, pairs=False),
    Lever("sequence 2", "sequence", {"engine": {"sequence_parallel": 2}}, ranks=2),
    Lever("tensor 2", "tensor", fsdp(tensor_parallel_size=2), ranks=2, splits=True),
    Lever(
        "pipeline 2",
        "pipeline",
        fsdp(pipeline_parallel_size=2),
        ranks=2,
        splits=True,
        excludes=("activations", "adapters"),
    ),
    Lever(
        "pipeline gpipe",
        "pipeline",
        fsdp(pipeline_parallel_size=2, pipeline_schedule="gpipe"),
        ranks=2,
        pairs=False,
    ),
    Lever("units by size", "units", fsdp(wrap_policy={"min_num_params": 20_000}), ranks=2, pairs=False),
    Lever("deterministic", "determinism", fsdp(full_determinism=True), pairs=False),
    # transformers' norms round to fp32 even in float64; a compiler may omit this rounding.
    Lever("compiled", "compiled", fsdp(use_torch_compile=True), pairs=False, precisions=("fp32", "bf16")),
    Lever("adapters", "adapters", {"model": {"lora_rank": 8}}, against=None, needs=("peft",)),
)


def pair(first: Lever, second: Lever) -> Lever:
    """Combine two levers."""
    sections = [*first.options, *(name for name in second.options if name not in first.options)]
    together = {name: {**first.options.get(name, {}), **second.options.get(name, {})} for name in sections}
    splits = first.splits or second.splits
    return Lever(
        f"{first.name} + {second.name}",
        "",
        together,
        ranks=first.ranks * second.ranks if splits else max(first.ranks, second.ranks),
        against=next((lever.name for lever in (first, second) if lever.against is None), first.against),
        needs=tuple(dict.fromkeys((*first.needs, *second.needs))),
        precisions=tuple(name for name in first.precisions if name in second.precisions),
    )


def rows(device: str, *, pairs: bool) -> list[Lever]:
    """Return all levers, and the pairs of levers that can run here."""
    able = [lever for lever in LEVERS if lever.pairs and missing(lever, device) is None]
    both = [
        pair(first, second)
        for first, second in itertools.combinations(able, 2)
        if first.axis != second.axis
        and first.axis not in second.excludes
        and second.axis not in first.excludes
    ]
    return [PLAIN, *LEVERS, *(both if pairs else [])]


def missing(lever: Lever, device: str) -> str | None:
    """Return why a lever cannot run here, or None."""
    packages = [name for name in lever.needs if name != "cuda" and find_spec(name) is None]
    if "cuda" in lever.needs and device != "cuda":
        return "needs a CUDA device"
    if packages:
        return f"needs {', '.join(packages)}"
    if device == "cuda" and lever.ranks > torch.cuda.device_count():
        return f"needs {lever.ranks} devices"
    return None


def judge(row: dict[str, Any], gradients: dict[str, Any], against: str | None, rounding: float) -> None:
    """Add the differences to a row, and the list of bounds that it misses.

    Args:
        row: the row.
        gradients: the gradients of all rows so far, by name and precision.
        against: the row to compare with, or None.
        rounding: the plain path's own error in bf16.
    """
    row["differences"], row["failures"] = {}, []
    if against is None:
        return
    if against not in gradients:
        row["failures"].append(f"the gradient of '{against}' is missing, so nothing was compared")
        return
    for precision, found in gradients[row["name"]].items():
        gap = row["differences"][precision] = difference(found, gradients[against][precision])
        bound = BOUNDS.get(precision, ROUNDINGS * rounding)
        if not gap <= bound:
            row["failures"].append(
                f"{precision} gradient differs by {gap:.1e}, at most {bound:.1e} is allowed"
            )


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the norm of the difference divided by the norm of the expected gradient, over all weights."""
    if set(found) != set(wanted):
        return float("inf")
    gap = sum(float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted)
    size = sum(float(wanted[name].double().square().sum()) for name in wanted)
    return float((gap / size) ** 0.5)


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| lever | ranks | fp64 | fp32 | bf16 | peak MB | state MB | moves MB | tokens/s | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        if "skipped" in row:
            lines.append(f"| {row['name']} | {row['ranks']} |||||||| {row['skipped']} |")
            continue
        gaps = [f"{row['differences'][p]:.0e}" if p in row["differences"] else "" for p in PRECISIONS]
        sizes = [f"{row[name] / 1e6:.0f}" for name in ("peak_bytes", "state_bytes", "moved_bytes")]
        verdict = "; ".join(row["failures"]) or "pass"
        cells = [row["name"], str(row["ranks"]), *gaps, *sizes, f"{row['tokens_per_s']:,.0f}", verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def run(levers: Sequence[Lever], options: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_models(folder, options.device)
        gradients: dict[str, Any] = {"transformers": reference(folder, options.device)}
        rounding = 0.0
        for lever in levers:
            row: dict[str, Any] = {"name": lever.name, "ranks": lever.ranks, "options": lever.options}
            found.append(row)
            why = missing(lever, options.device)
            if why is not None:
                row["skipped"] = why
                continue
            job = (folder, lever.options, lever.ranks, lever.precisions, options.device, options.steps)
            try:
                measured, taken = measure(*job)
            except RowFailed as error:
                row["skipped"], row["failures"] = "failed", [str(error)]
                continue
            row |= measured
            gradients[lever.name] = taken
            if lever is PLAIN:
                rounding = difference(taken["bf16"], taken["fp64"])
            judge(row, gradients, lever.against, rounding)
            print(f"{lever.name}: {'; '.join(row['failures']) or 'pass'}", file=sys.stderr, flush=True)
    return found


def against_resident(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Fit the growth of resident memory in a step as a line over the allocator's peak.

    The result has the slope (bytes for each byte of the peak) and the offset in bytes.
    """
    both = [(row["peak_bytes"], row["resident_bytes"]) for row in found if row.get("resident_bytes")]
    if len(both) < 3:
        return {}
    account, resident = torch.tensor(both, dtype=torch.float64).T
    line = torch.linalg.lstsq(torch.stack([account, torch.ones_like(account)], 1), resident).solution
    return {
        "rows": len(both),
        "bytes_for_each": float(line[0]),
        "bytes_besides": float(line[1]),
        "correlation": float(torch.corrcoef(torch.stack([account, resident]))[0, 1]),
    }


def write(path: Path, found: Sequence[dict[str, Any]], order: Sequence[str]) -> None:
    """Write the rows to the file; they replace earlier rows of the same name."""
    machine = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": " ".join(["python benchmarks/levers.py", *sys.argv[1:]]),
    }
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    by_name = {row["name"]: row for row in [*old, *({**row, "machine": machine} for row in found)]}
    kept = [by_name[name] for name in order if name in by_name]
    report = {
        "rows": kept,
        "account_against_resident_memory": against_resident(kept),
        "bounds": {**BOUNDS, "bf16": f"{ROUNDINGS} times the plain path's distance to fp64"},
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--only", nargs="+", help="only rows whose name contains one of these, and always plain"
    )
    parser.add_argument("--no-pairs", action="store_true")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each row; the best counts")
    parser.add_argument("--quick", action="store_true", help="no pairs, one timed step")
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    options = arguments(parser, quick=True, only=["plain"])
    options.steps = 1 if options.quick else options.steps
    levers = rows(options.device, pairs=not (options.quick or options.no_pairs))
    if options.only:
        levers = [PLAIN, *(row for row in levers[1:] if any(part in row.name for part in options.only))]
    found = run(levers, options)
    print("\n".join(table(found)))
    if options.out is not None:
        write(options.out, found, [lever.name for lever in rows(options.device, pairs=True)])
    check = against_resident(found)
    if check:
        print(
            f"resident memory grew by {check['bytes_for_each']:.2f} bytes for each allocated byte, plus "
            f"{check['bytes_besides'] / 1e6:.0f} MB (correlation {check['correlation']:.3f})"
        )
    failures = [f"{row['name']}: {'; '.join(row['failures'])}" for row in found if row.get("failures")]
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
