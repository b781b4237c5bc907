"""Train with TRL's GRPO from a given model to a given accuracy. Print one line of JSON.

    .peers/trl/bin/python benchmarks/peers/trl_train.py --model DIR --train train.parquet --val val.parquet

The options have Tandem's names and meanings, and `main` maps them to TRL's. Evaluation is greedy, and its
time is reported separately.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl
from trl import GRPOTrainer
from trl_common import StepClock, base_config, load_model, load_prompts, own_reward


class Evaluation(TrainerCallback):
    """Measures greedy accuracy before training and every few steps, and stops training at the target."""

    def __init__(self, rows: Dataset, clock: StepClock, *, every: int, target: float, max_new: int) -> None:
        self._rows = rows
        self._clock = clock
        self._every = every
        self._target = target
        self._max_new = max_new
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0

    def on_train_begin(self, _args: Any, _state: Any, control: TrainerControl, **parts: Any) -> None:
        self._evaluate(0, control, **parts)

    def on_step_end(self, _args: Any, state: Any, control: TrainerControl, **parts: Any) -> None:
        if state.global_step % self._every == 0:
            self._evaluate(state.global_step, control, **parts)

    def _evaluate(
        self,
        step: int,
        control: TrainerControl,
        model: PreTrainedModel,
        processing_class: PreTrainedTokenizerBase,
        **_: Any,
    ) -> None:
        began = time.perf_counter()
        accuracy = self._accuracy(model, processing_class)
        self.seconds += time.perf_counter() - began
        self._clock.restart()
        spent = {"seconds": sum(self._clock.seconds), "cpu_seconds": sum(self._clock.cpu_seconds)}
        self.curve.append({"step": step, **spent, "accuracy": accuracy})
        control.should_training_stop = accuracy >= self._target

    def _accuracy(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
        inputs = tokenizer.apply_chat_template(
            list(self._rows["prompt"]),
            add_generation_prompt=True,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_dict=True,
        ).to(model.device)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=self._max_new)
        model.train(was_training)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        columns = (self._rows[name] for name in ("ground_truth", "data_source", "extra_info"))
        scores = own_reward(completions, *columns)
        return sum(score >= 1 for score in scores) / len(scores)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16-autocast", "bf16-pure"])
    parser.add_argument("--train-batch-size", type=int, default=32, help="prompts per step")
    parser.add_argument("--n", type=int, default=8, help="completions per prompt")
    parser.add_argument("--mini-batch-size", type=int, default=32, help="prompts per optimizer step")
    parser.add_argument("--micro-batch-size", type=int, default=256, help="completions per forward pass")
    parser.add_argument("--ppo-epochs", type=int, default=1)
    parser.add_argument("--max-response-length", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--lr-warmup-steps", type=int, default=0)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--clip-ratio-low", type=float, default=0.2)
    parser.add_argument("--clip-ratio-high", type=float, default=0.2)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--test-freq", type=int, default=5, help="optimizer steps between evaluations")
    parser.add_argument("--max-steps", type=int, default=500, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    mini_batch = args.mini_batch_size * args.n
    micro_batch = min(args.micro_batch_size, mini_batch)
    clock = StepClock()
    evaluation = Evaluation(
        load_prompts(args.val),
        clock,
        every=args.test_freq,
        target=args.target,
        max_new=args.max_response_length,
    )
    trainer = GRPOTrainer(
        model=load_model(args.model, args.precision),
        reward_funcs=own_reward,
        train_dataset=load_prompts(args.train),
        args=base_config(
            args.precision,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=mini_batch // micro_batch,
            generation_batch_size=args.train_batch_size * args.n,
            num_generations=args.n,
            num_iterations=args.ppo_epochs,
            max_completion_length=args.max_response_length,
            temperature=args.temperature,
            learning_rate=args.lr,
            warmup_steps=args.lr_warmup_steps,
            weight_decay=args.weight_decay,
            max_grad_norm=args.clip_grad,
            epsilon=args.clip_ratio_low,
            epsilon_high=args.clip_ratio_high,
            max_steps=args.max_steps,
            seed=args.seed,
        ),
        callbacks=[clock, evaluation],
    )
    trainer.train()

    final = evaluation.curve[-1]
    report = {
        "reached": final["accuracy"] >= args.target,
        "seconds_training": final["seconds"],
        "seconds_evaluating": evaluation.seconds,
        "optimizer_steps": final["step"],
        "curve": evaluation.curve,
        "arguments": vars(args),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
