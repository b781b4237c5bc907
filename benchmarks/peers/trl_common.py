"""What the TRL scripts share. They run in TRL's own environment (`make peers`), not in Tandem's."""

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
    """A parquet file in the users' format, as the columns that TRL hands to a reward function."""
    rows = Dataset.from_parquet(path)
    truths = [str(row["ground_truth"]) for row in rows["reward_model"]]
    return rows.select_columns(["prompt", "data_source", "extra_info"]).add_column("ground_truth", truths)


def load_model(path: str, precision: str) -> PreTrainedModel:
    """precision: fp32; bf16-autocast (fp32 master weights, as Tandem has them); bf16-pure (no master)."""
    dtype = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def own_reward(
    completions: list[Any],
    ground_truth: list[str],
    data_source: list[str],
    extra_info: list[dict[str, Any]],
    **_: Any,
) -> list[float]:
    """The scores that Tandem gives, by the data source of each row."""
    texts = [completion[0]["content"] for completion in completions]
    rows = zip(data_source, texts, ground_truth, extra_info, strict=True)
    return [scored.score for scored in score([Item(*row) for row in rows])]


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
    """Seconds of each step, generation included: from one step's end to the next one's. Those of the
    process's CPU time are `cpu_seconds`."""

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
        """Leaves out what happened since the last step's end."""
        self._last, self._last_cpu = time.perf_counter(), time.process_time()


class Turns(StepClock):
    """Takes a step for each line of the standard input, and answers with a line of JSON: the step's seconds.
    Whatever else is printed goes to the error output. The training ends with the input."""

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
