"""Check the intervals of `tandem plan --probe` against real runs.

The probe predicts, from 32 prompts, the share of groups without spread. The reference is the first step of a
real run with the same weights over 1,024 groups. There are ten runs of models with one million parameters,
warmed up as in `tandem demo` on its tasks, with different group sizes and temperatures. The probe draws its
prompts and samples with seed 1, the run with seed 2. Both draw from all training prompts, so they may share
some prompts.

    OMP_NUM_THREADS=1 python benchmarks/plan_probe.py [--folder DIR] [--out FILE.json]

Runs in an existing file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from tiny import arguments, small_demo

from tandem.config.load import load_train_config
from tandem.config.root import TrainConfig
from tandem.demo import gym
from tandem.demo.problems import LONGEST_PROMPT, LONGEST_RESPONSE
from tandem.demo.program import make_task, warm_up
from tandem.trainer.assembly import build_ppo
from tandem.trainer.probe import report, run_probe

GROUPS, TRUTH = 32, 1024
RUNS: tuple[tuple[str, int, int, float], ...] = (  # task, seed of the task, responses per prompt, temperature
    (gym.ARITHMETIC, 0, 8, 1.0),
    (gym.ARITHMETIC, 0, 2, 0.6),
    (gym.ARITHMETIC, 1, 4, 1.0),
    ("spell_backward", 0, 4, 1.0),
    ("spell_backward", 0, 2, 0.5),
    ("number_sorting", 0, 8, 1.0),
    ("number_sorting", 0, 3, 0.7),
    ("manipulate_matrix", 0, 2, 1.0),
    ("string_insertion", 0, 2, 0.8),
    ("palindrome_generation", 0, 6, 0.4),
)


def model_of(folder: Path, task: str, seed: int) -> Path:
    """Return the folder of a task's warmed-up model, which is next to its problems."""
    made = folder / f"{task}_{seed}"
    if not (made / "warm_model").exists():
        make_task(made, seed, task)
        warm_up(made, seed, lambda sentence: None, task)
    return made / "warm_model"


def config_of(
    folder: Path, run: tuple[str, int, int, float], seed: int, place: Path, truth: int
) -> TrainConfig:
    task, own, n, temperature = run
    model = model_of(folder, task, own)
    prompt, response = LONGEST_PROMPT, LONGEST_RESPONSE
    if task != gym.ARITHMETIC:
        prompt, response = gym.GYMS[task].prompt, gym.GYMS[task].response
    words = [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"data.train_files={model.parent / 'train.parquet'}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        f"data.train_batch_size={truth}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n={n}",
        f"actor_rollout_ref.rollout.temperature={temperature}",
        "actor_rollout_ref.rollout.max_num_seqs=512",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={truth}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "trainer.device=cpu",
        f"trainer.seed={seed}",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={place}",
        "trainer.save_freq=0",
        "trainer.samples_freq=-1",
        "trainer.logger=[]",
        "reward.num_workers=0",
    ]
    return load_train_config(None, words).config


def judged(folder: Path, run: tuple[str, int, int, float], groups: int, truth: int) -> dict[str, Any]:
    """Return the prediction of the probe for a run, and the true value of its first step."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        config = config_of(folder, run, 1, Path(name) / "never", truth)
        began = time.perf_counter()
        found = report(run_probe(config, groups=groups, limit_s=600, say=lambda sentence: None), config)
        probed_s = time.perf_counter() - began
        assert not (Path(name) / "never").exists()
        trainer = build_ppo(config_of(folder, run, 2, Path(name) / "run", truth), say=lambda sentence: None)
        try:
            with closing(trainer.steps()) as steps:
                for _ in steps:
                    pass
        finally:
            trainer.shutdown()
        metrics = trainer.done.metrics
    teach = found["teach"]
    low, high = 1 - teach["high"], 1 - teach["low"]
    share = float(metrics["reward/zero_std_share"])
    return {
        "run": list(run),
        "without_spread": {"value": 1 - teach["value"], "low": low, "high": high},
        "truth": share,
        "inside": low <= share <= high,
        "groups": found["groups"],
        "probe_s": round(probed_s, 2),
        "response_length": [found["response_length"]["value"], float(metrics["response_length/mean"])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan_probe.json"))
    parser.add_argument("--folder", type=Path, help="folder for models and runs; default: a temporary folder")
    args = arguments(parser)
    groups, truth = (4, 16) if args.tiny else (GROUPS, TRUTH)
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    with tempfile.TemporaryDirectory() as name:
        for run in RUNS[:1] if args.tiny else RUNS:
            if all(row["run"] != list(run) for row in rows):
                with small_demo() if args.tiny else nullcontext():
                    rows.append(judged(args.folder or Path(name), run, groups, truth))
                last = rows[-1]
                print(*run, last["without_spread"], last["truth"], last["inside"], flush=True)
                whole = {
                    "command": "OMP_NUM_THREADS=1 python benchmarks/plan_probe.py",
                    "cores": os.cpu_count(),
                    "versions": {"python": platform.python_version(), "torch": torch.__version__},
                    "inside": sum(row["inside"] for row in rows),
                    "runs": len(rows),
                    "truth_groups": truth,
                    "rows": rows,
                }
                args.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"{sum(row['inside'] for row in rows)} of {len(rows)} runs are inside the interval")


if __name__ == "__main__":
    main()
