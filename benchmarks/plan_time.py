"""Check the time model against real runs: factors fitted to some configs predict other configs.

Each run is `tandem bench` with dummy weights in this process, in fp32 on one thread: one warm-up step, then
three measured steps. The clock is the process's CPU time, which other programs disturb less than wall-clock
time. The runs of the two sets alternate. The factors come only from the first set. For each run the program
reports the predicted time of a step divided by the measured time. The second set differs from the first in
size, lengths, batch, mini-batches and estimator.

    OMP_NUM_THREADS=1 python benchmarks/plan_time.py [--report] [--out benchmarks/results/plan_time.json]

Runs in an existing file are not repeated; `--report` only evaluates the runs in the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tiny import arguments

from tandem.bench.asked import Asked, draw, load
from tandem.bench.measure import measure
from tandem.config.changed_models import stored_config
from tandem.memory.seconds import Rates, Work, fit, predict, step_work
from tandem.memory.shapes import model_shape
from tandem.observability.timers import Timeline

MODELS = {  # hidden, intermediate, layers, heads, key heads, vocabulary
    "3M": (256, 768, 4, 4, 2, 258),
    "7M": (320, 1024, 5, 5, 1, 2000),
    "16M": (384, 1536, 6, 6, 2, 4000),
    "30M": (512, 1536, 8, 8, 4, 8000),
    "52M": (640, 2048, 8, 10, 2, 16000),
    "107M": (768, 2560, 12, 12, 4, 16000),
}
KL, TWICE = "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.ppo_epochs=2"
# model, estimator, prompts, responses per prompt, prompts per mini-batch, tokens per micro-batch, lengths of
# prompts and of responses, further keys
FITTED: list[tuple[Any, ...]] = [
    ("3M", "grpo", 6, 8, 6, 2048, "12", "lognormal:60:150"),
    ("3M", "gae", 24, 1, 12, 4096, "uniform:8:64", "96"),
    ("3M", "rloo", 8, 4, 4, 1024, "100", "30", KL),
    ("7M", "grpo", 4, 6, 2, 2048, "uniform:10:40", "uniform:20:120"),
    ("16M", "gae", 12, 1, 6, 1024, "30", "lognormal:50:110", KL),
    ("16M", "grpo", 4, 4, 4, 2048, "16", "120"),
    ("30M", "grpo", 4, 4, 2, 1024, "40", "uniform:16:60", KL),
    ("30M", "rloo", 8, 2, 8, 2048, "20", "48"),
    ("52M", "gae", 8, 1, 4, 512, "24", "60"),
    ("52M", "grpo", 2, 6, 2, 512, "60", "lognormal:40:90"),
    ("107M", "grpo", 2, 4, 2, 512, "24", "40", KL),
    ("107M", "rloo", 4, 2, 2, 512, "48", "uniform:10:60"),
]
HELD_OUT: list[tuple[Any, ...]] = [
    ("3M", "opo", 8, 4, 4, 2048, "uniform:8:30", "uniform:10:100", KL),
    ("3M", "gae", 12, 2, 12, 2048, "20", "lognormal:80:200"),
    ("7M", "rloo", 8, 3, 4, 1024, "60", "lognormal:40:100"),
    ("7M", "reinforce_plus_plus_baseline", 6, 4, 6, 2048, "24", "100", KL),
    ("16M", "dr_grpo", 4, 5, 2, 1024, "uniform:20:60", "50", KL),
    ("16M", "gae", 10, 1, 5, 2048, "16", "uniform:40:160"),
    ("30M", "grpo", 4, 4, 4, 1024, "12", "lognormal:60:130"),
    ("30M", "gae", 8, 1, 8, 1024, "50", "60", KL),
    ("52M", "rloo", 3, 4, 3, 512, "16", "uniform:20:80", TWICE),
    ("52M", "opo", 4, 3, 2, 1024, "40", "40", KL),
    ("107M", "grpo", 3, 3, 3, 512, "16", "lognormal:40:90"),
    ("107M", "gae", 6, 1, 3, 512, "32", "40"),
]


def words(folder: Path, run: tuple[Any, ...]) -> tuple[str, ...]:
    """Return a config of `tandem train`, as key=value words."""
    name, estimator, prompts, n, mini, tokens, _, _, *further = run
    hidden, inner, layers, heads, key_heads, vocabulary = MODELS[name]
    file = folder / f"{name}.json"
    stored = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    }
    file.write_text(json.dumps(stored))
    actor = "actor_rollout_ref.actor"
    critic = (f"critic.ppo_mini_batch_size={mini}",) if estimator == "gae" else ()
    return (
        f"actor_rollout_ref.model.path={file}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"algorithm.adv_estimator={estimator}",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.rollout.n={n}",
        f"{actor}.ppo_mini_batch_size={mini}",
        f"{actor}.use_dynamic_bsz=true",
        f"{actor}.ppo_max_token_len_per_gpu={tokens}",
        "data.max_prompt_length=128",
        "data.max_response_length=256",
        "trainer.device=cpu",
        *critic,
        *further,
    )


def observe(folder: Path, run: tuple[Any, ...]) -> dict[str, Any]:
    """Measure one run: median seconds of each phase, and the shortest and longest step."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        asked = Asked(words(folder, run), True, run[6], run[7], 3, 1, False, Path(own))
        found = measure(asked, lambda _: None)
    step = found["rows"]["step"]
    return {
        "run": list(run),
        "measured": found["parts"] | {"step": step["median"]},
        "least_to_most": [step["least"], step["most"]],
        "rates": found["rates"],
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "device": found["machine"]["device"],
    }


def work_of(folder: Path, run: tuple[Any, ...]) -> dict[str, Work]:
    """Return the work in a step of a run, according to the time model."""
    config, _ = load(words(folder, run), folder, dummy=True)
    drawn = draw(config, run[6], run[7])
    shape = model_shape(stored_config(config.actor_rollout_ref.model.path))
    return step_work(config, shape, drawn.prompts, drawn.responses.ravel(), item=4)


def judge(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Fit the factors to the first set, and add a prediction to each row."""
    works = [work_of(folder, tuple(row["run"])) for row in rows]
    fitted = [(work, row) for work, row in zip(works, rows, strict=True) if tuple(row["run"]) in FITTED]
    rates = Rates(**fitted[-1][1]["rates"])
    phases = dict.fromkeys(phase for work, _ in fitted for phase in work)
    seen = {
        phase: [
            (work[phase], s) for work, row in fitted if phase in work and (s := row["measured"][phase]) > 0
        ]
        for phase in phases
    }
    factors = {phase: fit(observed, rates) for phase, observed in seen.items() if observed}
    off: dict[str, list[float]] = {"fitted": [], "held out": []}
    for work, row in zip(works, rows, strict=True):
        row["set"] = "fitted" if tuple(row["run"]) in FITTED else "held out"
        row["predicted"] = predict(work, rates, factors)
        row["off"] = row["predicted"]["step"] / row["measured"]["step"] - 1
        off[row["set"]].append(abs(row["off"]))
    summary = {
        kind: {"runs": len(each), "median": statistics.median(each), "worst": max(each)}
        for kind, each in off.items()
        if each
    }
    return {**summary, "unit_rates": asdict(rates), "factors": factors}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/plan_time.json"))
    parser.add_argument("--report", action="store_true", help="only evaluate the runs in the file")
    args = arguments(parser)
    fitted, held_out = (FITTED[:1], HELD_OUT[:1]) if args.tiny else (FITTED, HELD_OUT)
    Timeline.now = lambda _: time.process_time()  # type: ignore[method-assign]
    report: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    with tempfile.TemporaryDirectory() as name:
        for run in () if args.report else itertools.chain(*zip(fitted, held_out, strict=True)):
            if all(row["run"] != list(run) for row in report["rows"]):
                report["rows"].append(observe(Path(name), run))
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report, indent=1) + "\n")
                print(*run, f"{report['rows'][-1]['measured']['step']:.3f} s", flush=True)
        report |= {
            "command": "OMP_NUM_THREADS=1 python benchmarks/plan_time.py",
            "clock": "CPU time of the process",
            "cores": os.cpu_count(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            **judge(Path(name), report["rows"]),
        }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for row in report["rows"]:
        print(f"{row['set']:<9} {row['off']:+.3f} of {row['measured']['step']:.3f} s ", *row["run"])
    for kind in ("fitted", "held out"):
        if kind in report:
            print(f"{kind}: median error {report[kind]['median']:.3f}, worst {report[kind]['worst']:.3f}")


if __name__ == "__main__":
    main()
