"""Wall-clock to 0.9 accuracy on the demo's task from the same warmed-up model, Tandem against TRL.

Both train with GRPO on 64 prompts of 8 completions a step, the same constant learning rate and AdamW, in
fp32, and look at the greedy accuracy every 5 steps; time spent looking is left out of both. The two
take turns over several seeds; reported are the medians of seconds and steps, and their ratio.

    python benchmarks/reward_vs_trl.py [--seeds 0 1 2] [--out FILE]

TRL runs in its own environment: `make peers` makes it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from grpo_step_vs_trl import HERE, TRL, run_json

from tandem.config.load import load_train_config
from tandem.demo.problems import LONGEST_PROMPT, LONGEST_RESPONSE
from tandem.demo.program import make_task, warm_up
from tandem.observability.run import read_metrics
from tandem.trainer.assembly import build_ppo

TARGET, PROMPTS, N, LR, EVERY, MOST_STEPS = 0.9, 64, 8, 5e-4, 5, 100


def tandem_run(folder: Path, seed: int) -> dict[str, Any]:
    """Runs in a process of its own, which ends as soon as the target is seen."""
    run = folder / f"tandem_{seed}"
    overrides = [
        f"actor_rollout_ref.model.path={folder / 'warm_model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={LONGEST_PROMPT}",
        f"data.max_response_length={LONGEST_RESPONSE}",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n={N}",
        "actor_rollout_ref.rollout.max_num_seqs=512",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        f"actor_rollout_ref.actor.optim.lr={LR}",
        f"trainer.total_training_steps={MOST_STEPS}",
        f"trainer.test_freq={EVERY}",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={run}",
        "trainer.logger=[]",
    ]
    trainer = build_ppo(load_train_config(None, overrides).config, say=lambda _: None)
    validate = trainer.validate

    def validate_and_stop(step: int) -> dict[str, float]:
        metrics = validate(step)
        trainer.session.interrupted = metrics["val/accuracy"] >= TARGET
        return metrics

    trainer.validate = validate_and_stop  # type: ignore[method-assign]
    trainer.fit()
    rows = read_metrics(run / "metrics.jsonl")
    return {
        "seconds": sum(row.get("timing/step", 0.0) for row in rows),
        "steps": rows[-1]["step"],
        "accuracy": rows[-1]["val/accuracy"],
    }


def trl_run(folder: Path, seed: int) -> dict[str, Any]:
    report = run_json(
        [
            str(TRL), str(HERE / "peers" / "trl_train.py"),
            "--model", str(folder / "warm_model"), "--train", str(folder / "train.parquet"),
            "--val", str(folder / "val.parquet"), "--target", str(TARGET), "--precision", "fp32",
            "--train-batch-size", str(PROMPTS), "--n", str(N), "--mini-batch-size", str(PROMPTS),
            "--micro-batch-size", "512", "--max-response-length", str(LONGEST_RESPONSE), "--lr", str(LR),
            "--test-freq", str(EVERY), "--max-steps", str(MOST_STEPS), "--seed", str(seed),
        ]
    )  # fmt: skip
    return {
        "seconds": report["seconds_training"],
        "steps": report["optimizer_steps"],
        "accuracy": report["curve"][-1]["accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tandem", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tandem:
        print(json.dumps(tandem_run(Path(args.tandem[0]), int(args.tandem[1]))))
        return
    if not TRL.exists():
        sys.exit("TRL's environment is missing: run `make peers` first")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder, seed=0)
        warm_up(folder, seed=0, say=lambda _: None)
        print(" seed   tandem s  steps  accuracy      trl s  steps  accuracy")
        for seed in args.seeds:
            tandem = run_json([sys.executable, __file__, "--tandem", name, str(seed)])
            trl = trl_run(folder, seed)
            rows.append({"seed": seed, "tandem": tandem, "trl": trl})
            cells = [f"{r['seconds']:>10.1f} {r['steps']:>6} {r['accuracy']:>9.3f}" for r in (tandem, trl)]
            print(f"{seed:>5} {' '.join(cells)}", flush=True)
    medians = {side: statistics.median(row[side]["seconds"] for row in rows) for side in ("tandem", "trl")}
    print(
        f"median seconds {medians['tandem']:.1f} and {medians['trl']:.1f}: "
        f"{medians['trl'] / medians['tandem']:.2f} times"
    )
    if args.out:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "trl": "1.16.0",
            },
            "median_seconds": medians,
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
