"""Measure which algorithms learn: validation accuracy against training time on the demo's task.

The benchmark trains every advantage estimator with the loss vanilla, and every policy loss with the estimator
grpo. A cell is an estimator, a loss and a seed. It trains for a given number of seconds from the demo's warm
model, which is right about a third of the time. The learning rate is constant, and a step has two updates
unless OF_LOSSES says otherwise. Estimators that compare the samples of a prompt get 64 prompts with eight
samples each; other estimators get 512 prompts with one sample. Each cell runs in its own process and writes
one JSON file. Finished cells are kept, and a killed cell starts over. At the end the program writes a table
and a figure, and counts the algorithms that reach the goal (accuracy 0.85) in two of three seeds.

    python benchmarks/learning_curves.py [--only NAME …] [--seeds 3] [--seconds 60] [--jobs 1] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from curves_svg import Curve, Panel, draw
from tiny import arguments, small_demo

from tandem.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from tandem.config.load import load_train_config
from tandem.demo.problems import LONGEST_PROMPT, LONGEST_RESPONSE
from tandem.demo.program import make_task, warm_up
from tandem.errors import ConfigErrors
from tandem.rewards.arithmetic import compute_score
from tandem.runtime import BatchFuture
from tandem.trainer.assembly import build_ppo
from tandem.trainer.ppo import PPOTrainer

GOAL = 0.85
ACTOR = "actor_rollout_ref.actor"
SETTINGS = (
    f"data.max_prompt_length={LONGEST_PROMPT}",
    f"data.max_response_length={LONGEST_RESPONSE}",
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ACTOR}.ppo_max_token_len_per_gpu=2048",
    f"{ACTOR}.optim.betas=[0.9,0.95]",
    f"{ACTOR}.optim.lr=5e-4",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.rollout.max_num_seqs=512",
    "trainer.total_training_steps=100000",
    "trainer.test_freq=5",
    "trainer.resume_mode=disable",
    "trainer.logger=[]",
)
GROUPS = (
    "data.train_batch_size=64",
    f"{ACTOR}.ppo_mini_batch_size=32",
    "actor_rollout_ref.rollout.n=8",
)
SINGLE = ("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=256")
CRITIC = (
    "critic.model.enable_gradient_checkpointing=false",
    "critic.ppo_max_token_len_per_gpu=2048",
    "critic.ppo_mini_batch_size=128",
    "critic.optim.lr=1e-3",
    "critic.optim.betas=[0.9,0.95]",
    "trainer.critic_warmup=3",
)
OF_ESTIMATORS: Mapping[str, tuple[str, ...]] = {
    "gae": ("algorithm.lam=0.95",),
    "gdpo": (f"custom_reward_function.path={__file__}", "custom_reward_function.name=in_parts"),
    "grpo_passk": (f"{ACTOR}.optim.lr=2.5e-4",),
}
OF_LOSSES: Mapping[str, tuple[str, ...]] = {
    "bypass_mode": ("algorithm.rollout_correction.bypass_mode=true",),
    "cispo": (f"{ACTOR}.optim.lr=2.5e-4",),
    "dro": (f"{ACTOR}.policy_loss.dro_beta=1.0",),
    "gpg": (f"{ACTOR}.ppo_mini_batch_size=64",),
    "gspo": (f"{ACTOR}.clip_ratio_low=0.003", f"{ACTOR}.clip_ratio_high=0.004"),
    "kl_cov": (f"{ACTOR}.optim.lr=2.5e-4",),
    "reinforce": (f"{ACTOR}.ppo_mini_batch_size=64",),
    "sapo": (f"{ACTOR}.optim.lr=2.5e-4",),
}
"""Further keys of an algorithm.

An algorithm that collapsed or missed the goal with the common settings has a smaller learning rate, or one
update per step.
"""


def in_parts(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Return the task's score, with components for a right answer and for shown working."""
    score = compute_score(data_source, solution_str, ground_truth, extra_info)
    return {"score": score, "right": score, "worked": float("," in solution_str and "=" in solution_str)}


@dataclass(frozen=True)
class Cell:
    """One run."""

    estimator: str
    loss: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.estimator}+{self.loss}+{self.seed}"

    def words(self) -> list[str]:
        columns = ADVANTAGES.find(self.estimator).columns
        return [
            *SETTINGS,
            *(GROUPS if "group" in columns else SINGLE),
            *(CRITIC if "values" in columns else ()),
            f"algorithm.adv_estimator={self.estimator}",
            f"{ACTOR}.policy_loss.loss_mode={self.loss}",
            f"trainer.seed={self.seed}",
            *OF_ESTIMATORS.get(self.estimator, ()),
            *OF_LOSSES.get(self.loss, ()),
        ]


class TimedTrainer(PPOTrainer):
    """A trainer that stops after the step that passes `limit_s` seconds, and records each validation."""

    limit_s = math.inf
    trained_s = 0.0
    curve: tuple[tuple[int, float, float], ...] = ()

    def step(self, step: int, prompts: BatchFuture) -> dict[str, float]:
        began = time.perf_counter()
        metrics = super().step(step, prompts)
        self.trained_s += time.perf_counter() - began
        return metrics

    def validate(self, step: int) -> dict[str, float]:
        metrics = super().validate(step)
        self.curve = (*self.curve, (step, self.trained_s, metrics["val/accuracy"]))
        return metrics

    def at_step_boundary(self, step: int) -> None:
        if self.trained_s >= self.limit_s and step + 1 < self.rhythm.total_steps:
            self.rhythm = replace(self.rhythm, total_steps=step + 1)


def task(folder: Path, seed: int) -> Path:
    """Return the folder of the demo's problems and warm model for a seed; it is made once."""
    made, done = folder / f"task_{seed}", folder / f"task_{seed}" / "done"
    if not done.exists():
        shutil.rmtree(made, ignore_errors=True)
        make_task(made, seed)
        warm_up(made, seed, lambda sentence: None)
        done.touch()
    return made


def train(cell: Cell, folder: Path, seconds: float) -> None:
    """Run a cell and write its file."""
    made, run = task(folder, cell.seed), folder / "runs" / cell.name
    shutil.rmtree(run, ignore_errors=True)
    found: dict[str, Any] = {"estimator": cell.estimator, "loss": cell.loss, "seed": cell.seed}
    words = [
        f"actor_rollout_ref.model.path={made / 'warm_model'}",
        f"data.train_files={made / 'train.parquet'}",
        f"data.val_files={made / 'val.parquet'}",
        f"trainer.default_local_dir={run}",
        *cell.words(),
    ]
    try:
        config = load_train_config(None, words).config
    except ConfigErrors as refused:
        found |= {"refused": str(refused.errors[0])}
    else:
        trainer = build_ppo(config, say=lambda sentence: None, trainer=TimedTrainer)
        assert isinstance(trainer, TimedTrainer)
        trainer.limit_s = seconds
        try:
            trainer.fit()
        finally:
            trainer.shutdown()
        if trainer.session.interrupted:
            sys.exit("interrupted; the next run repeats this cell from the start")
        found |= {"seconds": seconds, "curve": trainer.curve, "final": trainer.curve[-1][2]}
    found["machine"] = machine()
    partial = cell_file(cell, folder).with_suffix(".partial")
    partial.write_text(json.dumps(found) + "\n")
    partial.replace(cell_file(cell, folder))


def machine() -> dict[str, Any]:
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def cell_file(cell: Cell, folder: Path) -> Path:
    return folder / "cells" / f"{cell.name}.json"


def cells(only: Iterable[str], seeds: int) -> list[Cell]:
    """Return the cells of the named algorithms, or of all algorithms if no name is given."""
    wanted = set(only) or {*ADVANTAGES.names, *POLICY_LOSSES.names}
    if unknown := wanted - {*ADVANTAGES.names, *POLICY_LOSSES.names}:
        sys.exit(f"unknown algorithm: {', '.join(sorted(unknown))}")
    pairs = [(name, "vanilla") for name in ADVANTAGES.names if name in wanted]
    pairs += [("grpo", name) for name in POLICY_LOSSES.names if name in wanted]
    return [Cell(*pair, seed) for pair in dict.fromkeys(pairs) for seed in range(seeds)]


def run_in_process(cell: Cell, options: argparse.Namespace) -> str | None:
    """Run an unfinished cell in a separate process; return its name if it fails."""
    if cell_file(cell, options.folder).exists():
        return None
    command = [sys.executable, __file__, "--folder", str(options.folder), "--seconds", str(options.seconds)]
    log = options.folder / "logs" / f"{cell.name}.txt"
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.jobs))}
    with log.open("w") as file, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*command, "--cell", cell.estimator, cell.loss, str(cell.seed)],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=10 * options.seconds + 600,
            check=False,
        )
    finished = cell_file(cell, options.folder).exists()
    print(f"{cell.name}: {'done' if finished else f'failed, see {log}'}", flush=True)
    return None if finished else cell.name


def report(found: list[dict[str, Any]]) -> tuple[str, list[Panel], dict[str, Any]]:
    """Return a table in Markdown, a chart for each pair, and the numbers."""
    rows = ["| estimator | loss | final accuracy by seed | mean | seeds at 0.85 |", "|---|---|---|---|---|"]
    panels, summary = [], []
    for (estimator, loss), group in groupby(found, key=lambda cell: (cell["estimator"], cell["loss"])):
        members = list(group)
        if "refused" in members[0]:
            rows.append(f"| {estimator} | {loss} | refused | | |")
            continue
        finals = [cell["final"] for cell in members]
        reached = sum(max(point[2] for point in cell["curve"]) >= GOAL for cell in members)
        mean = statistics.mean(finals)
        shown = " ".join(f"{final:.3f}" for final in finals)
        rows.append(f"| {estimator} | {loss} | {shown} | {mean:.3f} | {reached} of {len(finals)} |")
        curves: list[Curve] = [[(at, accuracy) for _, at, accuracy in cell["curve"]] for cell in members]
        title = estimator if loss == "vanilla" else f"{loss} (loss)"
        panels.append(Panel(title, f"{mean:.2f}", curves))
        summary.append({"estimator": estimator, "loss": loss, "finals": finals, "reached": reached})
    most = [row for row in summary if 3 * row["reached"] >= 2 * len(row["finals"])]
    rows.append(f"\n{len(most)} of {len(summary)} reach {GOAL} in at least two of three seeds.")
    return "\n".join(rows) + "\n", panels, {"goal": GOAL, "pairs": summary, "reached": len(most)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="estimators or losses")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of training steps for each cell")
    parser.add_argument("--jobs", type=int, default=1, help="number of cells that run at the same time")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/learning_curves"), help="folder of tasks and cells"
    )
    parser.add_argument("--out", type=Path, help="also write learning_curves.{json,md,svg} to this folder")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    options = arguments(parser, only=["rloo"], seeds=1, seconds=0.1)
    if options.cell is not None:
        estimator, loss, seed = options.cell
        train(Cell(estimator, loss, int(seed)), options.folder, options.seconds)
        return
    for part in ("cells", "logs"):
        (options.folder / part).mkdir(parents=True, exist_ok=True)
    wanted = cells(options.only, options.seeds)
    with small_demo() if options.tiny else nullcontext():
        for seed in range(options.seeds):
            task(options.folder, seed)
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = [name for name in pool.map(lambda cell: run_in_process(cell, options), wanted) if name]
    files = [cell_file(cell, options.folder) for cell in wanted]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    table, panels, summary = report(found)
    print(table)
    if options.out is not None:
        summary |= {"machine": machine(), "seconds": options.seconds, "cells": found}
        (options.out / "learning_curves.json").write_text(json.dumps(summary) + "\n")
        (options.out / "learning_curves.md").write_text(table)
        (options.out / "learning_curves.svg").write_text(draw(panels, goal=GOAL))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
