"""Count the healthy short runs that get a warning or an error, which is a false alarm.

The settings of each run are drawn from a seed: algorithm, rollout engine, sampling, sizes, adapters,
reference and optimizer. A tiny random model learns to write digits.

    python benchmarks/healthy_runs.py [--runs 200] [--steps 6] [--seed N] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from tiny import arguments
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from tandem.config.load import load_train_config
from tandem.demo.model import build_tokenizer
from tandem.demo.problems import split, write_problems
from tandem.errors import ConfigErrors, TandemError
from tandem.observability.reading import Run
from tandem.trainer.run import run_ppo

POLICY = "actor_rollout_ref"
CHOICES = {
    "data.train_batch_size": (4, 6, 8),
    f"{POLICY}.rollout.n": (2, 3, 4, 8),
    f"{POLICY}.actor.ppo_mini_batch_size": (2, 4, 6, 8),
    f"{POLICY}.actor.ppo_epochs": (1, 1, 2),
    f"{POLICY}.actor.optim.lr": (1e-4, 1e-3, 3e-3),
    f"{POLICY}.actor.optim.optimizer": ("adamw", "adamw", "muon"),
    f"{POLICY}.actor.entropy_coeff": (0.0, 0.0, 0.003),
    f"{POLICY}.actor.use_kl_loss": ("false", "false", "true"),
    f"{POLICY}.model.lora_rank": (0, 0, 0, 4),
    f"{POLICY}.rollout.name": ("native", "native", "hf"),
    f"{POLICY}.rollout.temperature": (0.7, 1.0, 1.0, 1.2),
    f"{POLICY}.rollout.top_p": (1.0, 1.0, 0.9),
    "data.max_response_length": (4, 6, 12),
    "data.seed": tuple(range(1000)),
}


def digits(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> dict[str, float]:
    """Return the share of digits among the first two characters, with one component for each."""
    first, second = (float(solution_str[place : place + 1].isdigit()) for place in (0, 1))
    return {"score": (first + second) / 2, "first": first, "second": second}


def make_task(folder: Path) -> list[str]:
    """Write a random model of a few thousand parameters and problems; return the keys of every run."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_problems(folder / "train.parquet", split(seed=0, train=24, validation=8).train, part="train")
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.parquet'}",
        "data.max_prompt_length=8",
        "trainer.save_freq=0",
        "trainer.samples_freq=1",
        "trainer.logger=[]",
        "reward.num_workers=0",
        f"custom_reward_function.path={__file__}",
        "custom_reward_function.name=digits",
    ]


def settings(seed: int) -> Iterator[list[str]]:
    """Yield configs without end, as key=value words; the config rules refuse some of them."""
    draw = random.Random(seed)
    while True:
        words = [f"{key}={draw.choice(values)}" for key, values in CHOICES.items()]
        estimator, loss = draw.choice(ADVANTAGES.names), draw.choice(POLICY_LOSSES.names)
        estimator, loss = draw.choice([(estimator, "vanilla"), ("grpo", loss), (estimator, loss)])
        loss_word = [] if loss == "vanilla" else [f"{POLICY}.actor.policy_loss.loss_mode={loss}"]
        yield [*words, f"algorithm.adv_estimator={estimator}", *loss_word]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=20261124)
    parser.add_argument("--out", type=Path)
    given = arguments(parser, runs=2, steps=2)
    alarms: list[dict[str, object]] = []
    tried, began, seen = Counter[str](), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        common = [*make_task(Path(folder)), f"trainer.total_training_steps={given.steps}"]
        for words in settings(given.seed):
            place = Path(folder, f"run{seen}")
            try:
                config = load_train_config(
                    None, [*common, f"trainer.default_local_dir={place}", *words]
                ).config
            except ConfigErrors:
                continue  # the config rules refuse this combination
            try:
                if run_ppo(config, say=lambda _: None):
                    sys.exit("interrupted")
                events = [event for event in Run(place).events if event["event"] == "warning"]
                told = [f"{event['name']}: {event['text']}" for event in events]
            except TandemError as error:
                told = [str(error)]
            tried.update(word for word in words if "adv_estimator" in word or "loss_mode" in word)
            if told:
                alarms.append({"words": words, "told": told})
                print(*words, *told, sep="\n  ", flush=True)
            seen += 1
            if seen == given.runs:
                break
    facts = {
        "runs": seen,
        "steps": given.steps,
        "alarms": alarms,
        "tried": dict(sorted(tried.items())),
        "seconds": round(time.monotonic() - began),
    }
    print(f"{seen} healthy runs of {given.steps} steps, {len(alarms)} with a false alarm")
    if given.out:
        given.out.write_text(json.dumps(facts, indent=1) + "\n")
    return int(len(alarms) * 200 > seen)


if __name__ == "__main__":
    sys.exit(main())
