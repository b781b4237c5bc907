"""Measure the time to a target reward: Tandem and TRL learn six demo tasks from the same models.

Both start from the same warmed-up models and train with GRPO in fp32, with the same prompts and responses per
step, lengths, constant learning rate and AdamW. Both measure the greedy accuracy every 2 steps; the time of
this evaluation is excluded for both. Seconds are the process's CPU time on one thread, which other programs
disturb less than wall-clock time; the file has both. A run ends when the evaluation reaches the target, or at
the maximum number of steps. The sides take turns, task by task and seed by seed, so other load affects both.
For each pair the file has the curves and the machine's load. Pairs in the file are not repeated.

    OMP_NUM_THREADS=1 python benchmarks/scoreboard.py [TASK …] [--seeds 0 1 2 3 4] [--out FILE]
    python benchmarks/scoreboard.py --report

One seed of all tasks takes at most half an hour. `--report` draws the figure and prints the table from the
existing file. TRL runs in its own environment; create it with `make peers`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import transformers
from curves_svg import COLOURS, Panel, draw
from grpo_step_vs_trl import HERE, TRL, run_json
from tiny import arguments, peer, small_demo

from tandem.config.load import load_train_config
from tandem.demo.gym import ARITHMETIC, GYMS
from tandem.demo.problems import LONGEST_PROMPT, LONGEST_RESPONSE
from tandem.demo.program import GYM_PROMPTS, make_task, warm_up
from tandem.observability.run import read_metrics
from tandem.trainer.assembly import build_ppo
from tandem.trainer.loop import Loop, Schedule

TASKS = (
    ARITHMETIC,
    "manipulate_matrix",
    "rotate_matrix",
    "spell_backward",
    "spiral_matrix",
    "string_insertion",
)
TARGET, N, LR, EVERY, MOST_STEPS = 0.9, 8, 5e-4, 2, 100
RESULTS = HERE / "results" / "scoreboard.json"
SIDES = ("tandem", "trl")


def sizes(task: str) -> tuple[int, int, int]:
    """Return the prompts per step, and the tokens of the longest prompt and of the longest response."""
    if task == ARITHMETIC:
        return 64, LONGEST_PROMPT, LONGEST_RESPONSE
    return GYM_PROMPTS["grpo"], GYMS[task].prompt, GYMS[task].response


class Clocked(Schedule[Any]):
    """The usual schedule, which also records the CPU time of each step after the validation at step 0."""

    def __init__(self) -> None:
        self.cpu_seconds = [0.0]

    def step(self, step: int, loop: Loop[Any]) -> dict[str, float]:
        began = time.process_time()
        metrics = super().step(step, loop)
        self.cpu_seconds.append(time.process_time() - began)
        return metrics


def tandem_run(folder: Path, task: str, seed: int, steps: int) -> dict[str, Any]:
    """Train in a separate process until the target is reached."""
    run = folder / f"tandem_{seed}"
    prompts, prompt, response = sizes(task)
    overrides = [
        f"actor_rollout_ref.model.path={folder / 'warm_model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n={N}",
        "actor_rollout_ref.rollout.max_num_seqs=512",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        f"actor_rollout_ref.actor.optim.lr={LR}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={EVERY}",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={run}",
        "trainer.logger=[]",
        "reward.num_workers=0",  # in this process, as in TRL
    ]
    clock = Clocked()
    trainer = build_ppo(load_train_config(None, overrides).config, say=lambda _: None, schedule=clock)
    validate = trainer.validate

    def validate_and_stop(step: int) -> dict[str, float]:
        metrics = validate(step)
        trainer.session.interrupted = metrics["val/accuracy"] >= TARGET
        return metrics

    trainer.validate = validate_and_stop  # type: ignore[method-assign]
    trainer.fit()
    rows = read_metrics(run / "metrics.jsonl")
    passed = accumulate(row.get("timing/step", 0.0) for row in rows)
    looked = [
        {"step": row["step"], "seconds": seconds, "cpu_seconds": cpu, "accuracy": row["val/accuracy"]}
        for row, seconds, cpu in zip(rows, passed, accumulate(clock.cpu_seconds), strict=True)
        if "val/accuracy" in row
    ]
    return outcome(looked)


def trl_run(folder: Path, task: str, seed: int, steps: int) -> dict[str, Any]:
    prompts, _, response = sizes(task)
    report = run_json(
        [
            str(TRL), str(HERE / "peers" / "trl_train.py"),
            "--model", str(folder / "warm_model"), "--train", str(folder / "train.parquet"),
            "--val", str(folder / "val.parquet"), "--target", str(TARGET), "--precision", "fp32",
            "--train-batch-size", str(prompts), "--n", str(N), "--mini-batch-size", str(prompts),
            "--micro-batch-size", str(prompts * N), "--max-response-length", str(response), "--lr", str(LR),
            "--test-freq", str(EVERY), "--max-steps", str(steps), "--seed", str(seed),
        ]
    )  # fmt: skip
    return outcome(report["curve"])


def outcome(curve: list[dict[str, float]]) -> dict[str, Any]:
    """Return the result of a run, with its curve as (step, CPU seconds, accuracy)."""
    points = [[point["step"], round(point["cpu_seconds"], 3), round(point["accuracy"], 4)] for point in curve]
    step, seconds, accuracy = points[-1]
    return {
        "reached": accuracy >= TARGET,
        "cpu_seconds": seconds,
        "wall_seconds": round(curve[-1]["seconds"], 3),
        "steps": step,
        "curve": points,
    }


def measure(folder: Path, task: str, seed: int, sides: Sequence[str], steps: int) -> dict[str, Any]:
    """Run both sides one after the other; the order alternates with the seed."""
    row: dict[str, Any] = {"task": task, "seed": seed, "load": [round(os.getloadavg()[0], 2)]}
    for side in sides if seed % 2 == 0 else sides[::-1]:
        if side == "tandem":
            words = ["--tandem", str(folder), task, str(seed), str(steps)]
            row[side] = run_json([sys.executable, __file__, *words])
        else:
            row[side] = trl_run(folder, task, seed, steps)
        row["load"].append(round(os.getloadavg()[0], 2))
    return row


def told(run: dict[str, Any]) -> str:
    return f"{run['cpu_seconds']:>8.1f} s {run['steps']:>4}{' ' if run['reached'] else '*'}"


def table(report: dict[str, Any]) -> str:
    """Return a Markdown table of each task: medians over seeds, and the median of the seeds' ratios."""
    lines = [
        "| task | seeds | Tandem reached it | s | steps | TRL reached it | s | steps | TRL's s / Tandem's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        rows = [row for row in report["rows"] if row["task"] == task]
        if not rows:
            continue
        cells = []
        for side in SIDES:
            runs = [row[side] for row in rows]
            seconds, steps = (statistics.median(run[key] for run in runs) for key in ("cpu_seconds", "steps"))
            cells.append(f"{sum(run['reached'] for run in runs)} | {seconds:.1f} | {steps:.0f}")
        ratios = [row["trl"]["cpu_seconds"] / row["tandem"]["cpu_seconds"] for row in rows]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| `{task}` | {len(rows)} | {' | '.join(cells)} | {spread} |")
    return "\n".join(lines)


def figure(report: dict[str, Any]) -> str:
    """Draw the curves of all seeds: Tandem blue, TRL red."""
    panels = []
    for task in TASKS:
        rows = [row for row in report["rows"] if row["task"] == task]
        if not rows:
            continue
        curves = [[(s, a) for _, s, a in row[side]["curve"]] for side in SIDES for row in rows]
        colours = [colour for colour in COLOURS[:2] for _ in rows]
        panels.append(Panel(task, "blue Tandem, red TRL", curves, colours))
    return draw(panels, goal=TARGET)


def machine() -> dict[str, Any]:
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads a side",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": "1.16.0",
        },
    }


def run_all(args: argparse.Namespace) -> None:
    """Run the pairs that the file does not have."""
    out, steps = args.out, 2 if args.tiny else MOST_STEPS
    sides = SIDES if peer("trl", tiny=args.tiny) else SIDES[:1]
    report = json.loads(out.read_text()) if out.exists() else {"target": TARGET, "rows": []}
    report |= {"command": " ".join(["python", *sys.argv]), **machine()}
    with tempfile.TemporaryDirectory() as name:
        print("Tandem, then TRL: seconds and steps to the target; * means not reached")
        for seed in args.seeds:
            for task in args.tasks or TASKS:
                if any((row["task"], row["seed"]) == (task, seed) for row in report["rows"]):
                    continue
                folder = Path(name) / task
                if not folder.exists():
                    make_task(folder, 0, task)
                    warm_up(folder, 0, lambda _: None, task)
                row = measure(folder, task, seed, sides, steps)
                report["rows"].append(row)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(report) + "\n")
                print(f"{seed:>3} {task:<20} {' '.join(told(row[side]) for side in sides)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--report", action="store_true", help="only draw the figure and print the table of the file"
    )
    parser.add_argument("--tandem", nargs=4, help=argparse.SUPPRESS)
    args = arguments(parser, tasks=[ARITHMETIC])
    if args.tandem:
        print(json.dumps(tandem_run(Path(args.tandem[0]), args.tandem[1], *map(int, args.tandem[2:]))))
        return
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"unknown task {', '.join(unknown)}; use one of {', '.join(TASKS)}")
    if not args.report:
        with small_demo() if args.tiny else nullcontext():
            run_all(args)
    report = json.loads(args.out.read_text())
    if any(side not in row for row in report["rows"] for side in SIDES):
        return  # a tiny run without TRL has nothing to compare
    args.out.with_suffix(".svg").write_text(figure(report))
    print(table(report))


if __name__ == "__main__":
    main()
