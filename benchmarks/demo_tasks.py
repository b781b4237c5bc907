"""Run the demo's reasoning-gym tasks, and record seconds and accuracy before, during and after.

The seconds include the warm start.

    python benchmarks/demo_tasks.py [TASK …] [--seed 0] [--out benchmarks/results/demo_tasks.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tiny import arguments, small_demo

from tandem.demo.gym import GYMS
from tandem.demo.program import run_demo
from tandem.observability.run import read_metrics


def measure(task: str, seed: int, overrides: list[str], metrics: Sequence[str] = ()) -> dict[str, Any]:
    """Run a task once; the curve has pairs of step and validation accuracy.

    The other metrics that the run has are lists over its steps of training.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        done = run_demo(
            Path(folder),
            task=task,
            algorithm="grpo",
            seed=seed,
            control="none",
            ranks=1,
            overrides=overrides,
            say=print,
        )
        rows = read_metrics(done.run / "metrics.jsonl")
    curve = [[row["step"], round(row["val/accuracy"], 3)] for row in rows if "val/accuracy" in row]
    steps = {name: [round(row[name], 3) for row in rows if name in row] for name in metrics}
    return {
        "seconds": round(done.seconds, 1),
        "before": curve[0][1],
        "after": curve[-1][1],
        "load_at_start": round(load, 2),
        "curve": curve,
        **{name: values for name, values in steps.items() if values},
    }


def device() -> dict[str, Any]:
    """Return the facts about this machine and its packages."""
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")]
    packages = ("torch", "transformers", "reasoning-gym")
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/demo_tasks.json"))
    given = arguments(parser, tasks=["spell_backward"])
    overrides = ["trainer.total_training_steps=1", "reward.num_workers=0"] if given.tiny else []
    found = json.loads(given.out.read_text()) if given.out.exists() else {"tasks": {}}
    found |= {"device": device(), "command": f"tandem demo TASK --seed {given.seed}"}
    for task in given.tasks or GYMS:
        with small_demo() if given.tiny else nullcontext():
            found["tasks"][task] = row = measure(task, given.seed, overrides)
        print({task: row})
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
