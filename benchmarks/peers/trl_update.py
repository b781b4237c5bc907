"""TRL's side of update_vs_trl.py. Runs in TRL's own environment (`make peers`).

It uses TRL's GRPO trainer with given rollouts in place of generation. A step is the time between the
callbacks on_step_begin and on_step_end: shuffling and splitting the batch, forward and backward of each
micro-batch, clipping, and AdamW.
"""

from __future__ import annotations

import platform
import queue
import threading
import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from sides import serve
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl_common import base_config, load_model

FOREVER = 10_000


class GivenRollouts(GRPOTrainer):
    """A trainer that uses `given`, TRL's dict of a batch, as the result of generation."""

    given: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.given)


class Gate(TrainerCallback):
    """Lets the trainer take one step for each request."""

    def __init__(self) -> None:
        self.questions: queue.Queue[None] = queue.Queue()
        self.answers: queue.Queue[dict[str, float] | None] = queue.Queue()
        self._norm = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.questions.get()
        self._began = time.perf_counter(), time.process_time()

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        if not self._norm:
            gradients = [p.grad.float() for p in model.parameters() if p.grad is not None]
            self._norm = torch.nn.utils.get_total_norm(gradients).item()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began, began_cpu = self._began
        took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - began_cpu}
        self.answers.put(took | {"gradient_norm": self._norm})


class TRLSide:
    def open(
        self,
        folder: str,
        rollouts: dict[str, Any],
        precision: str,
        micro: int,
        threads: int,
        device: str,
    ) -> dict[str, str]:
        """Build the trainer and start it; it waits before its first step. Return the versions."""
        torch.set_num_threads(threads)
        assert device == ("cuda" if torch.cuda.is_available() else "cpu"), (
            "TRL always uses a GPU if the machine has one"
        )
        samples = len(rollouts["completions"])
        self._gate = Gate()
        trainer = GivenRollouts(
            model=load_model(folder, precision),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["1"] * samples}),
            args=base_config(
                precision,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=samples // micro,
                num_generations=2,
                max_completion_length=max(map(len, rollouts["completions"])),
                max_steps=FOREVER,
                learning_rate=1e-6,
            ),
            callbacks=[self._gate],
        )
        given = table(rollouts, trainer.processing_class.pad_token_id)
        trainer.given = {name: value.to(device) for name, value in given.items()}
        threading.Thread(target=self._train, args=(trainer,), daemon=True).start()
        return {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }

    def _train(self, trainer: GivenRollouts) -> None:
        try:
            trainer.train()
        finally:
            self._gate.answers.put(None)

    def step(self) -> dict[str, float]:
        self._gate.questions.put(None)
        took = self._gate.answers.get()
        assert took is not None, "training has ended"
        return took


def table(rollouts: dict[str, Any], padding: int) -> dict[str, torch.Tensor]:
    """Convert rollouts to TRL's format, with completions padded on the right."""
    lengths = torch.tensor([len(ids) for ids in rollouts["completions"]])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    completions = torch.full(mask.shape, padding)
    completions[mask] = torch.tensor([token for ids in rollouts["completions"] for token in ids])
    prompts = torch.tensor(rollouts["prompts"])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask.long(),
        "advantages": torch.tensor(rollouts["advantages"]),
        "num_items_in_batch": mask.sum(),
    }


if __name__ == "__main__":
    side = TRLSide()
    serve({"open": side.open, "step": side.step})
