"""Functions of all TRL scripts, which run in TRL's own environment (`make peers`), not in Tandem's."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from trl import GRPOConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tandem.rewards import Item, score


def load_prompts(path: str) -> Dataset:
    """Read a parquet file in Tandem's format, with the columns that TRL passes to a reward function."""
    rows = Dataset.from_parquet(path)
    truths = [str(row["ground_truth"]) for row in rows["reward_model"]]
    return rows.select_columns(["prompt", "data_source", "extra_info"]).add_column("ground_truth", truths)


def load_model(path: str, precision: str) -> PreTrainedModel:
    """Load a model in a precision.

    Args:
        path: the model's folder.
        precision: fp32, bf16-autocast (fp32 master weights, as in Tandem) or bf16-pure (no master weights).
    """
    dtype = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def own_reward(
    completions: list[Any],
    ground_truth: list[str],
    data_source: list[str],
    extra_info: list[dict[str, Any]],
    **_: Any,
) -> list[float]:
    """Return Tandem's scores, by the data source of each row."""
    texts = [completion[0]["content"] for completion in completions]
    rows = zip(data_source, texts, ground_truth, extra_info, strict=True)
    return [scored.score for scored in score([Item(*row) for row in rows])]


def base_config(precision: str, **options: Any) -> GRPOConfig:
    """Return the config of all comparisons: GRPO without a reference model or other extra work."""
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
    """Records the seconds of each step, generation included, from the end of the previous step.

    `cpu_seconds` has the CPU time of the process.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.restart()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.restart()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._last)
        self.cpu_seconds.append(time.process_time() - self._last_cpu)
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the end of the last step."""
        self._last, self._last_cpu = time.perf_counter(), time.process_time()


class Turns(StepClock):
    """Takes a step for each line of stdin, and answers with the step's seconds as a line of JSON.

    Other output goes to stderr. The training ends with the input.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.restart()

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        super().on_step_end(*arguments, **options)
        print(json.dumps({"step": self.seconds[-1]}), file=self._answers, flush=True)
