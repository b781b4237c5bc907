"""The demo: from nothing to a policy that has learnt arithmetic by reinforcement, through the trainers that
`tandem sft` and `tandem train` run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.config.load import load_sft_config, load_train_config
from tandem.demo.model import write_model
from tandem.demo.problems import (
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    demonstrations,
    split,
    write_demonstrations,
    write_problems,
)
from tandem.errors import ConfigError
from tandem.observability.plot import plot
from tandem.observability.run import read_metrics, read_samples
from tandem.offline.export import export_checkpoint
from tandem.trainer.launch import ray_backend
from tandem.trainer.run import run_ppo, run_sft

TRAIN_PROBLEMS = 4000
VALIDATION_PROBLEMS = 512
FORGET_CARRY = 0.8
SFT_STEPS = 300
SFT_BATCH = 64
ALGORITHMS = ("grpo", "ppo")
CONTROLS = {
    "none": (),
    "zero-lr": ("actor_rollout_ref.actor.optim.lr=0",),
    "shuffled-rewards": (
        "custom_reward_function.path=tandem.demo.controls",
        "custom_reward_function.name=shuffled",
    ),
}

_COMMON = (
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
    "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
    "actor_rollout_ref.actor.optim.lr=5e-4",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "actor_rollout_ref.rollout.max_num_seqs=512",
    "trainer.total_training_steps=50",
    "trainer.test_freq=5",
    "trainer.save_freq=25",
)
SETTINGS = {
    "grpo": (*_COMMON, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"),
    "ppo": (
        *_COMMON,
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        "data.train_batch_size=512",
        "actor_rollout_ref.actor.ppo_mini_batch_size=512",
        "critic.model.enable_gradient_checkpointing=false",
        "critic.ppo_max_token_len_per_gpu=2048",
        "critic.ppo_mini_batch_size=128",
        "critic.optim.lr=1e-3",
        "critic.optim.betas=[0.9,0.95]",
        "trainer.critic_warmup=3",
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a demo.

    Attributes:
        folder: of everything it made.
        run: the reinforcement run's folder.
        before, after: validation accuracy.
        seconds: from the first file to the last step.
    """

    folder: Path
    run: Path
    before: float
    after: float
    seconds: float


def run_demo(
    folder: Path,
    *,
    algorithm: str,
    seed: int,
    control: str,
    ranks: int,
    overrides: list[str],
    say: Callable[[str], None],
) -> Outcome:
    """Makes the task, warms the model up, trains it, reports.

    Args:
        folder: where everything goes; an earlier demo of the same folder is replaced.
        algorithm: "grpo" or "ppo".
        control: a key of CONTROLS.
        ranks: processes that share the reinforcement's work.
        overrides: further `key=value` words for `tandem train`.
        say: prints to the user.
    """
    _check("--algo", algorithm, ALGORITHMS)
    _check("--control", control, tuple(CONTROLS))
    if ranks > 1:
        ray_backend(asked=f"--ranks {ranks}")  # refuses now what it would refuse after the warm-up
    began = time.perf_counter()
    say(f"1/3  making a tokenizer, a model and problems in {folder}")
    make_task(folder, seed)
    say("2/3  warming up: supervised fine-tuning on demonstrations that mostly forget to carry")
    warm = warm_up(folder, seed, say)
    say(f"3/3  reinforcement: {algorithm.upper()}, rewarded for right answers alone")
    run = folder / ("run" if control == "none" else f"run_{control}")
    devices = f"trainer.n_gpus_per_node={ranks}"
    words = [*SETTINGS[algorithm], *CONTROLS[control], devices, *overrides]
    _reinforce(folder, warm, run, words, seed, say)
    curve = [
        (row["step"], row["val/accuracy"])
        for row in read_metrics(run / "metrics.jsonl")
        if "val/accuracy" in row
    ]
    outcome = Outcome(folder, run, curve[0][1], curve[-1][1], time.perf_counter() - began)
    _report(outcome, curve, say)
    return outcome


def _check(option: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ConfigError("unknown value", field=option, got=given, expected=" or ".join(choices))


def make_task(folder: Path, seed: int) -> None:
    """Model, tokenizer, problems and demonstrations, as files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", seed=seed)
    problems = split(seed=seed, train=TRAIN_PROBLEMS, validation=VALIDATION_PROBLEMS)
    write_problems(folder / "train.parquet", problems.train, part="train")
    write_problems(folder / "val.parquet", problems.validation, part="validation")
    sloppy = demonstrations(problems.train, seed=seed, count=SFT_STEPS * SFT_BATCH, forget_carry=FORGET_CARRY)
    write_demonstrations(folder / "demonstrations.parquet", sloppy)


def warm_up(folder: Path, seed: int, say: Callable[[str], None]) -> Path:
    """The model of `make_task` after supervised fine-tuning, as the Hugging Face folder warm_model."""
    words = [
        f"model.path={folder / 'model'}",
        "model.enable_gradient_checkpointing=false",
        f"data.train_files={folder / 'demonstrations.parquet'}",
        f"data.train_batch_size={SFT_BATCH}",
        "optim.lr=3e-3",
        "optim.lr_scheduler_type=linear",
        "optim.lr_warmup_steps=20",
        f"trainer.total_training_steps={SFT_STEPS}",
        f"trainer.save_freq={SFT_STEPS}",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={folder / 'warm_up'}",
        "trainer.resume_mode=disable",
        "trainer.logger=[console]",
    ]
    run_sft(load_sft_config(None, words).config, say=say)
    out = folder / "warm_model"
    for old in sorted(out.glob("*")):
        old.unlink()
    return export_checkpoint(folder / "warm_up", out, dtype=torch.float32)


def _reinforce(
    folder: Path, model: Path, run: Path, settings: list[str], seed: int, say: Callable[[str], None]
) -> None:
    words = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        f"data.max_prompt_length={LONGEST_PROMPT}",
        f"data.max_response_length={LONGEST_RESPONSE}",
        "trainer.project_name=tandem-demo",
        f"trainer.experiment_name={run.name}",
        f"trainer.default_local_dir={run}",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,tensorboard]",
        *settings,
    ]
    run_ppo(load_train_config(None, words).config, say=say)


def _report(outcome: Outcome, curve: list[tuple[int, float]], say: Callable[[str], None]) -> None:
    say(plot({"accuracy": curve}, "validation accuracy", limits=(0, 1)))
    for title, step in (("before", curve[0][0]), ("after", curve[-1][0])):
        say(f"{title}:\n{_examples(outcome.run, step)}")
    say(
        f"accuracy on {VALIDATION_PROBLEMS} problems it never trained on: "
        f"{outcome.before:.3f} before, {outcome.after:.3f} after, in {outcome.seconds:.0f} s\n"
        f"run folder: {outcome.run} (metrics.jsonl, samples/, timeline.json, checkpoints/, tensorboard/)\n"
        "next:\n"
        "  tandem demo --algo ppo                 the same with a critic\n"
        f"  tandem export {outcome.run} my_model   a folder that transformers loads\n"
        f"  tandem train {outcome.run}/config.yaml trainer.default_local_dir=runs/mine "
        "algorithm.adv_estimator=rloo"
    )


def _examples(run: Path, step: int, count: int = 4) -> str:
    """A few validation answers of a step, those that need a carry."""
    table: dict[str, list[Any]] = read_samples(run / "samples" / f"step_{step:06d}_val.parquet")
    lines: list[str] = []
    for text, truth, score, info in zip(
        table["response_text"], table["ground_truth"], table["scores"], table["extra_info"], strict=True
    ):
        if "," in text and len(lines) < count:
            mark = "right" if score >= 1 else f"wrong, it is {truth}"
            lines.append(f"  {_question(info)}  {text}   {mark}")
    return "\n".join(lines)


def _question(info: Any) -> str:
    return str((json.loads(info) if isinstance(info, str) else info)["question"])
