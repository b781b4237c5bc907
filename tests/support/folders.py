"""Run folders that are written by hand, as a run would leave them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tandem.observability.run import RunFolder
from tandem.protocol import Ragged


def write_samples(
    folder: RunFolder,
    step: int,
    scores: list[float],
    part: str = "",
    prompts: Sequence[str] = (),
    responses: Sequence[str] = (),
) -> None:
    """Write one or two responses to each prompt of two tokens; the responses have 1, 2, … tokens."""
    count = len(scores)
    lengths = [2 + number for number in range(1, count + 1)]
    tokens = Ragged.from_list([list(range(length)) for length in lengths], torch.int64)
    mask = Ragged.from_list([[False, False, *[True] * (length - 2)] for length in lengths], torch.bool)
    texts = prompts or [f"q{number // 2}" for number in range(count)]
    folder.write_samples(
        step,
        {
            "tokens": tokens,
            "response_mask": mask,
            "scores": torch.tensor(scores),
            "uid": np.array([f"u{number // 2}" for number in range(count)], dtype=object),
            "sample": [number % 2 for number in range(count)],
            "messages": [[{"role": "user", "content": text}] for text in texts],
            "response_text": responses or [f"r{number}" for number in range(count)],
            "reward_extra": [{"acc": score} for score in scores],
            "reward_why": [f"because of\n\x1b[2J{score}" if score else "" for score in scores],
            "ground_truth": ["7"] * count,
            "data_source": ["sums"] * count,
            "finish_reason": ["stop"] * count,
        },
        part=part,
    )


def write_run(
    path: Path, rewards: Sequence[float], *, config: str = "", checkpoints: Sequence[int] = ()
) -> Path:
    """Write a finished run of `grpo`, with a complete checkpoint of 1,000 bytes at each of some steps."""
    folder = RunFolder(path)
    folder.write_config(
        "actor_rollout_ref: {model: {path: models/tiny}}\nalgorithm: {adv_estimator: grpo}\n"
        f"trainer: {{default_local_dir: {path}, samples_freq: -1}}\n{config}"
    )
    folder.event("start", step=0, total_steps=len(rewards))
    for step, reward in enumerate(rewards, 1):
        folder.log_metrics(step, {"reward/mean": reward, "timing/step": 2.0})
    for step in checkpoints:
        checkpoint = folder.checkpoints / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_bytes(b"x" * 1000)
        (checkpoint / "manifest.json").write_text(json.dumps({"files": {"weights": {"bytes": 1000}}}))
    folder.event("end", how="finished")
    return path
