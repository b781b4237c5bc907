"""The program of `tandem demo`, which trains a new model on a task by reinforcement learning.

The demo uses the same trainers as `tandem sft` and `tandem train`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.config.load import load_sft_config, load_train_config
from tandem.demo import gym
from tandem.demo.model import write_model
from tandem.demo.problems import (
    LONGEST_PROMPT,
    LONGEST_RESPONSE,
    demonstrations,
    split,
    write_demonstrations,
    write_problems,
    write_rows,
)
from tandem.errors import ConfigError
from tandem.observability.plot import plot
from tandem.observability.run import read_metrics, read_samples
from tandem.offline.export import export_checkpoint
from tandem.trainer.launch import ray_backend
from tandem.trainer.run import run_ppo, run_sft

TRAIN_PROBLEMS = 4000
VALIDATION_PROBLEMS = 512
GYM_VALIDATION = 256
GYM_PROMPTS = {"grpo": 32, "ppo": 256}
"""Prompts per step for tasks of reasoning-gym: half as many as for arithmetic, which has shorter sequences.
"""
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
_PLACE = "trainer.default_local_dir="


@dataclass(frozen=True)
class Outcome:
    """The outcome of a demo.

    Attributes:
        folder: folder of all files.
        run: the run folder of the reinforcement learning.
        before: validation accuracy before reinforcement learning.
        after: validation accuracy after reinforcement learning.
        seconds: seconds from the first file to the last step.
    """

    folder: Path
    run: Path
    before: float
    after: float
    seconds: float


def run_demo(
    folder: Path,
    *,
    task: str,
    algorithm: str,
    seed: int,
    control: str,
    ranks: int,
    overrides: list[str],
    say: Callable[[str], None],
) -> Outcome:
    """Make the task, fine-tune the model, train it by reinforcement learning, and print a report.

    Args:
        folder: folder for all files. An earlier demo in the same folder is replaced.
        task: "arithmetic", or a key of GYMS.
        algorithm: "grpo" or "ppo".
        seed: seed of the task and of the training.
        control: a key of CONTROLS.
        ranks: number of processes that share the reinforcement learning.
        overrides: additional `key=value` words for `tandem train`.
        say: prints a sentence for the user.
    """
    gym.check_task(task)
    for option, given, choices in (("--algo", algorithm, ALGORITHMS), ("--control", control, CONTROLS)):
        if given not in choices:
            raise ConfigError("unknown value", field=option, got=given, expected=" or ".join(choices))
    if ranks > 1:
        ray_backend(asked=f"--ranks {ranks}")  # fail now, not after the warm-up
    began = time.perf_counter()
    say(f"1/3  making a tokenizer, a model and problems in {folder}")
    make_task(folder, seed, task)
    flaw = "mostly forget to carry" if task == gym.ARITHMETIC else "are wrong more often than not"
    say(f"2/3  warming up: supervised fine-tuning on demonstrations that {flaw}")
    warm = warm_up(folder, seed, say, task)
    say(f"3/3  reinforcement learning: {algorithm.upper()}, only right answers are rewarded")
    chosen = [word.removeprefix(_PLACE) for word in overrides if word.startswith(_PLACE)]
    run = Path(chosen[-1]) if chosen else folder / ("run" if control == "none" else f"run_{control}")
    devices = f"trainer.n_gpus_per_node={ranks}"
    words = [*SETTINGS[algorithm], *_sizes(task, algorithm), *CONTROLS[control], devices, *overrides]
    places = [
        f"actor_rollout_ref.model.path={warm}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        "trainer.project_name=tandem-demo",
        f"trainer.experiment_name={run.name}",
        f"trainer.default_local_dir={run}",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,tensorboard]",
    ]
    run_ppo(load_train_config(None, [*places, *words]).config, say=say)
    curve = [
        (row["step"], row["val/accuracy"])
        for row in read_metrics(run / "metrics.jsonl")
        if "val/accuracy" in row
    ]
    outcome = Outcome(folder, run, curve[0][1], curve[-1][1], time.perf_counter() - began)
    _report(outcome, curve, task, seed, say)
    return outcome


def make_task(folder: Path, seed: int, task: str = gym.ARITHMETIC) -> None:
    """Write the model, tokenizer, problems and demonstrations to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    phrases: list[str] = []
    if task == gym.ARITHMETIC:
        problems = split(seed=seed, train=TRAIN_PROBLEMS, validation=VALIDATION_PROBLEMS)
        write_problems(folder / "train.parquet", problems.train, part="train")
        write_problems(folder / "val.parquet", problems.validation, part="validation")
        count = SFT_STEPS * SFT_BATCH
        sloppy = demonstrations(problems.train, seed=seed, count=count, forget_carry=FORGET_CARRY)
        shown = [(problem.question, response) for problem, response in sloppy]
    else:
        train, validation = gym.draw(task, seed=seed, train=TRAIN_PROBLEMS, validation=GYM_VALIDATION)
        write_rows(folder / "train.parquet", train)
        write_rows(folder / "val.parquet", validation)
        phrases = gym.phrases(train)
        shown = gym.demonstrations(train, seed=seed, count=gym.GYMS[task].warm_up * SFT_BATCH)
    write_model(folder / "model", seed=seed, phrases=phrases)
    write_demonstrations(folder / "demonstrations.parquet", shown)


def _sizes(task: str, algorithm: str) -> list[str]:
    """Return the words for reinforcement learning that depend on the task."""
    if task == gym.ARITHMETIC:
        return [f"data.max_prompt_length={LONGEST_PROMPT}", f"data.max_response_length={LONGEST_RESPONSE}"]
    made, prompts = gym.GYMS[task], GYM_PROMPTS[algorithm]
    return [
        f"data.max_prompt_length={made.prompt}",
        f"data.max_response_length={made.response}",
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"trainer.total_training_steps={made.steps}",
    ]


def warm_up(folder: Path, seed: int, say: Callable[[str], None], task: str = gym.ARITHMETIC) -> Path:
    """Fine-tune the model of `make_task`, and return its Hugging Face folder, warm_model."""
    steps = gym.GYMS[task].warm_up if task in gym.GYMS else SFT_STEPS
    words = [
        f"model.path={folder / 'model'}",
        "model.enable_gradient_checkpointing=false",
        f"data.train_files={folder / 'demonstrations.parquet'}",
        f"data.train_batch_size={SFT_BATCH}",
        "optim.lr=3e-3",
        "optim.lr_scheduler_type=linear",
        "optim.lr_warmup_steps=20",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
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


def _report(
    outcome: Outcome, curve: list[tuple[int, float]], task: str, seed: int, say: Callable[[str], None]
) -> None:
    say(plot({"accuracy": curve}, "validation accuracy", limits=(0, 1)))
    for title, step in (("before", curve[0][0]), ("after", curve[-1][0])):
        say(f"{title}:\n{_examples(outcome.run, step, task)}")
    again, own, examined = "tandem demo --algo ppo", "", VALIDATION_PROBLEMS
    if task != gym.ARITHMETIC:
        size = TRAIN_PROBLEMS + GYM_VALIDATION
        again, examined = f"tandem demo {task} --algo ppo", GYM_VALIDATION
        own = (
            f"\n  data.train_files='{gym.GYMS[task].reference(task, size, seed)}'   these problems in any run"
        )
    say(
        f"accuracy on {examined} problems it never trained on: "
        f"{outcome.before:.3f} before, {outcome.after:.3f} after, in {outcome.seconds:.0f} s\n"
        f"run folder: {outcome.run} (metrics.jsonl, samples/, timeline.json, checkpoints/, tensorboard/)\n"
        "next:\n"
        f"  {again:<38} the same with a critic\n"
        f"  tandem export {outcome.run} my_model   a folder that transformers loads\n"
        f"  tandem train {outcome.run}/config.yaml trainer.default_local_dir=runs/mine "
        f"algorithm.adv_estimator=rloo{own}"
    )


def _examples(run: Path, step: int, task: str, count: int = 4) -> str:
    """Return a few validation answers of a step."""
    table: dict[str, list[Any]] = read_samples(run / "samples" / f"step_{step:06d}_val.parquet")
    asked = [messages[0]["content"] for messages in table["messages"]]
    asked = asked if task == gym.ARITHMETIC else gym.own_parts(asked)
    columns = (asked, table["response_text"], table["ground_truth"], table["scores"])
    lines: list[str] = []
    for question, text, truth, score in list(zip(*columns, strict=True))[:count]:
        mark = "right" if score >= 1 else f"wrong, the answer is {_line(truth)}"
        lines.append(f"  {_line(question)}  {_line(text)}   {mark}")
    return "\n".join(lines)


def _line(text: str) -> str:
    return " ".join(text.split())
