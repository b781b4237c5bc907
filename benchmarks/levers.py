"""Every lever of the training engine, and the pairs of them that make sense, in one table: what each does to
the gradient, to memory and to speed.

Gradient: the relative difference to the plain path's, in float64, fp32 and bf16, of a small model with
sequences of unequal length. The plain path is one rank with packed sequences, all in one micro-batch, nothing
computed twice, moved or split; its own gradient is compared with that of transformers' model, one
sequence at a time with all logits. Bounds: 1e-9 in float64, 1e-5 in fp32; in bf16 twice the plain path's own
distance to float64, for two results that are each rounded so far may lie that far apart. On a CPU
activations that would leave the device are really copied from host memory to host memory.

Memory and speed: an update of a larger model, fp32 on a CPU and bf16 on a GPU. Peak memory is that of a step,
beside parameters and optimizer state ("state"): on a GPU from the caching allocator; on a CPU every
allocation and release that PyTorch's allocator reports to its profiler, added up. Resident memory would
count as well what the libraries hold beside tensors, and what the C library keeps when it is freed; it is
measured too, in a process of its own for each row, and the two are compared in the end. "moves" is what
the lever takes, or on a CPU would take, off the device. A process computes in one thread, so that rows
with one, two and four ranks are alike; speeds compare within the same number of ranks.

    python benchmarks/levers.py [--only NAME ...] [--device cpu | cuda] [--quick] [--no-pairs] [--out FILE]

A file that is there already keeps its other rows. Ends with an error if a row misses its bound or fails.
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
"""Of the plain path's own error in bf16, the bound there."""


@dataclass(frozen=True)
class Lever:
    """One row of the table.

    Attributes:
        name: in the table.
        axis: levers of one axis exclude each other, and make no pair.
        options: keys of the model, of fsdp_config and of optim, by section; "micro": of `MicroBatching`;
            "engine": further arguments of the engine.
        ranks: how many it needs.
        splits: whether other levers that need ranks need them besides.
        pairs: whether it is combined with the others.
        excludes: axes with which it cannot be combined.
        against: the row whose gradient it must have; None: it has one of its own, which its pairs must have.
        needs: packages; "cuda".
        precisions: in which its gradient is compared.
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
    # In float64 transformers' norms round to fp32 within, which a compiler may leave out.
    Lever("compiled", "compiled", fsdp(use_torch_compile=True), pairs=False, precisions=("fp32", "bf16")),
    Lever("adapters", "adapters", {"model": {"lora_rank": 8}}, against=None, needs=("peft",)),
)


def pair(first: Lever, second: Lever) -> Lever:
    """Both at once."""
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
    """All levers, and the pairs of those that can run here."""
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
    """Why it cannot run here."""
    packages = [name for name in lever.needs if name != "cuda" and find_spec(name) is None]
    if "cuda" in lever.needs and device != "cuda":
        return "needs a CUDA device"
    if packages:
        return f"needs {', '.join(packages)}"
    if device == "cuda" and lever.ranks > torch.cuda.device_count():
        return f"needs {lever.ranks} devices"
    return None


def judge(row: dict[str, Any], gradients: dict[str, Any], against: str | None, rounding: float) -> None:
    """Adds the differences, and whether they are within their bounds.

    Args:
        gradients: of all rows so far, by name and precision.
        rounding: the plain path's own error in bf16.
    """
    row["differences"], row["failures"] = {}, []
    if against is None:
        return
    if against not in gradients:
        row["failures"].append(f"no gradient of '{against}' to compare with")
        return
    for precision, found in gradients[row["name"]].items():
        gap = row["differences"][precision] = difference(found, gradients[against][precision])
        bound = BOUNDS.get(precision, ROUNDINGS * rounding)
        if not gap <= bound:
            row["failures"].append(f"{precision} gradient off by {gap:.1e}, bound {bound:.1e}")


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The norm of the difference over that of the wanted gradient, of all weights together."""
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
    """The growth of resident memory in a step as a line over the allocator's account: bytes for each byte of
    it, and bytes besides."""
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
    """Puts the rows in the file, in the places of earlier ones."""
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
    parser.add_argument("--only", nargs="+", help="rows whose name contains one of these; plain always")
    parser.add_argument("--no-pairs", action="store_true")
    parser.add_argument("--steps", type=int, default=3, help="timed ones of each row; the best counts")
    parser.add_argument("--quick", action="store_true", help="no pairs, one timed step")
    parser.add_argument("--out", type=Path, help="also write the results here, as JSON")
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
            f"resident memory grew by {check['bytes_for_each']:.2f} bytes for each of the account, and "
            f"{check['bytes_besides'] / 1e6:.0f} MB besides (correlation {check['correlation']:.3f})"
        )
    failures = [f"{row['name']}: {'; '.join(row['failures'])}" for row in found if row.get("failures")]
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
