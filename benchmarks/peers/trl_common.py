"""What the TRL scripts share. They run in TRL's own environment (`make peers`), not in Tandem's."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from trl import GRPOConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tandem.rewards.arithmetic import compute_score


def load_prompts(path: str) -> Dataset:
    """A parquet file in the users' format, as the columns that TRL hands to a reward function."""
    rows = Dataset.from_parquet(path)
    truths = [str(row["ground_truth"]) for row in rows["reward_model"]]
    return rows.select_columns(["prompt", "data_source"]).add_column("ground_truth", truths)


def load_model(path: str, precision: str) -> PreTrainedModel:
    """precision: fp32; bf16-autocast (fp32 master weights, as Tandem has them); bf16-pure (no master)."""
    dtype = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def arithmetic_reward(
    completions: list[Any], ground_truth: list[str], data_source: list[str], **_: Any
) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [
        compute_score(source, text, truth)
        for source, text, truth in zip(data_source, texts, ground_truth, strict=True)
    ]


def base_config(precision: str, **options: Any) -> GRPOConfig:
    """What is the same in every comparison: GRPO without a reference model, nothing that only costs time."""
    return GRPOConfig(
        output_dir="runs/trl",
        use_cpu=not torch.cuda.is_available(),
        bf16=precision == "bf16-autocast",
        gradient_checkpointing=False,
        beta=0.0,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


class StepClock(TrainerCallback):
    """Seconds of each step, generation included: from one step's end to the next one's."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def restart(self) -> None:
        """Leaves out what happened since the last step's end."""
        self._last = time.perf_counter()
