"""Measure everything that Tandem's documentation claims about GPUs, in one run: `make gpu`.

    python benchmarks/gpu.py [--phase environment decode training engine demo step] [--deadline SECONDS]
        [--out DIR] [--device auto] [--tiny] [--predictions] [--report]

environment  the machine, and the tests that need a GPU
decode       a decode step of the 1.5B at batch 256 with context 1k and 7.6k, and a few other shapes
training     log-probs and updates at 8k and 14k tokens with each setting; memory; optimizer offload
engine       512 requests of different lengths through the rollout engine; updates, graphs, host time
demo         `tandem demo`, and the kernels that take most of its time
step         a training step of the 1.5B, compared with verl's table for eight H100s

Each phase runs in its own process with its own time limit. It first measures how fast the device copies and
how fast it multiplies 8192-wide bf16 matrices. All shares refer to these two rates. It writes DIR/PHASE.json
after every row. A failed row holds the text of the error, and the next row continues, in a new process if the
device was lost. Rows without enough time left are skipped with a note. DIR/table.md shows the results beside
the predictions, and DIR/log.txt has the output of the phases. The program needs no special environment, no
pip and no network.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device.environment import about
from benchmarks.device.processes import ROOT, run_command, run_forked
from benchmarks.device.rates import H100, measure_rates
from benchmarks.device.report import LOST, Report, Setting, free_memory, measure
from benchmarks.device.table import bar, expected, markdown, percent, predict, predictions
from tandem.device import choose_device

PHASES = {  # the module of each phase, and the seconds after which the phase is ended
    "environment": ("environment", 270),
    "decode": ("decode", 180),
    "training": ("training", 530),
    "engine": ("generation", 330),
    "demo": ("demo", 300),
    "step": ("step", 530),
}
START_S = 25  # seconds that a process needs before its first row
LONGEST_LOG = 8 * 2**20
END_S = 8  # seconds to end a phase and to write the table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=list(PHASES), metavar="PHASE")
    parser.add_argument("--deadline", type=float, default=1800.0, help="time limit in seconds for all phases")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="the folder for the results")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="use the smallest shapes, to try this program")
    parser.add_argument("--predictions", action="store_true", help="print the predictions and stop")
    parser.add_argument(
        "--report", action="store_true", help="write the table from the results in DIR and stop"
    )
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "UNTIL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        run_phase(options)
    elif options.predictions:
        print_predictions(options)
    elif options.report:
        write_table(options.out)
    else:
        return run_all(options)
    return 0


def run_all(options: argparse.Namespace) -> int:
    """Run each phase in its own process; return 1 if a row has an error, else 0."""
    until = time.monotonic() + options.deadline
    options.out.mkdir(parents=True, exist_ok=True)
    for phase in options.phase:
        (options.out / f"{phase}.json").unlink(missing_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder,
        (options.out / "log.txt").open("a") as log,
    ):
        for phase in options.phase:
            watch(phase, options, Path(folder), until - END_S, log)
        shorten(Path(log.name))
    for left in options.out.glob("*.part"):
        left.unlink()
    write_table(options.out)
    errors = [
        f"{phase}: {row['name']}"
        for phase in options.phase
        for row in Report.at(options.out / f"{phase}.json").rows
        if "error" in row or row.get("failed")
    ]
    print("\n".join(["errors:", *errors] if errors else ["no errors"]))
    return int(bool(errors))


def watch(phase: str, options: argparse.Namespace, folder: Path, until: float, log: Any) -> None:
    """Start the process of a phase. If it dies in a row, start it again for the rows after that."""
    path = options.out / f"{phase}.json"
    ends = min(until, time.monotonic() + PHASES[phase][1])
    while True:
        left = ends - time.monotonic()
        if left < (1 if options.tiny else START_S):
            note(path, f"{phase}: only {max(left, 0):.0f} s left, too few to start", log)
            return
        print(f"{phase}: {left:.0f} s at most", flush=True)
        status = start(phase, options, folder, ends, log)
        report = Report.at(path)
        if status == 0:
            return
        ended = (
            f"its process ran longer than {left:.0f} s"
            if status is None
            else f"its process ended with {status}"
        )
        log.flush()
        if report.running is None and status != LOST:
            note(path, f"{phase}: {ended}:\n{tail(Path(log.name))}", log)
            return
        if report.running is not None:
            said = f"{ended}:\n{tail(Path(log.name))}"
            report.add({"name": report.running, "error": said, "message": ended, "took_s": 0.0})
        if status is None:
            return


def start(phase: str, options: argparse.Namespace, folder: Path, ends: float, log: Any) -> int | None:
    """Run the process of a phase; on a CPU the process is a fork.

    Returns:
        The exit status, or None if the process was ended at its time limit.
    """
    child, limit_s = ["--child", str(folder), str(ends)], ends - time.monotonic()
    if options.device == "cpu":
        given = vars(options) | {"phase": [phase], "child": child[1:]}
        return run_forked(lambda: run_phase(argparse.Namespace(**given)), limit_s, stderr=log)
    words = ["--phase", phase, "--out", str(options.out), "--device", options.device, *child]
    words += ["--tiny"] if options.tiny else []
    return run_command([sys.executable, __file__, *words], limit_s, stderr=log)


def note(path: Path, text: str, log: Any) -> None:
    """Add a note to the report of a phase."""
    report = Report.at(path)
    report.about.setdefault("notes", []).append(text)
    report.write()
    print(text, file=log, flush=True)
    print(text, flush=True)


def shorten(log: Path) -> None:
    """Keep only the end of a long log."""
    kept = tail(log, LONGEST_LOG)
    if log.stat().st_size > LONGEST_LOG:
        log.write_text(kept)


def tail(path: Path, characters: int = 1500) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - characters))
        return file.read().decode(errors="replace")


def run_phase(options: argparse.Namespace) -> None:
    """Measure a phase in the current process: the rates first, then the rows missing in its report."""
    (phase,), (folder, ends) = options.phase, options.child
    report = Report.at(options.out / f"{phase}.json")
    device = choose_device(options.device)
    if device.type == "cpu" and not options.tiny:
        sys.exit("no CUDA device was found; on a CPU use --tiny")
    rates = measure_rates(device, tiny=options.tiny)
    free_memory(device)
    setting = Setting(device, options.tiny, rates, Path(folder), until=float(ends) - 2)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    report.about |= {"phase": phase, "command": sys.argv, "began": now}
    report.about |= {"machine": about(device), "rates": rates.__dict__}
    report.write()
    rows = module(phase).rows(setting)
    told = predictions().get(phase, {})
    report.predicted = {row.name: predict(row, told.get(row.name), rates) for row in rows}
    measure(rows, setting, report)


def module(phase: str) -> ModuleType:
    return import_module(f"benchmarks.device.{PHASES[phase][0]}")


def write_table(out: Path) -> None:
    """Print the table of all phases that have a report, and write it to table.md."""
    reports = [
        (phase, Report.at(out / f"{phase}.json")) for phase in PHASES if (out / f"{phase}.json").exists()
    ]
    text = markdown(reports)
    (out / "table.md").write_text(text)
    print(text)


def print_predictions(options: argparse.Namespace) -> None:
    """Print the expected result of each row on an H100, and the reason."""
    setting = Setting(torch.device("cuda"), False, H100, Path(), 0.0)
    for phase in options.phase:
        told = predictions().get(phase, {})
        print(f"## {phase}\n\n{bar(['row', 'share', 'value', 'because'])}\n{bar(['---'] * 4)}")
        for row in module(phase).rows(setting):
            found = predict(row, told.get(row.name), H100)
            if found:
                because = told[row.name]["because"]
                print(bar([row.name, percent(found["share"]), expected(found, row.unit), because]))
        print()


if __name__ == "__main__":
    sys.exit(main())
