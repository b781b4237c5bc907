"""Measure seconds per GRPO step in TRL with completions of given lengths. Print one line of JSON.

    .peers/trl/bin/python benchmarks/peers/trl_grpo_step.py --model DIR --prompts train.parquet \
        --lengths lengths.json --precision fp32

The sampler forces the lengths: the end token is impossible before a completion's length and certain at that
length. grpo_step_vs_trl.py tries several values of `--micro-batch` and of the precision, and takes the
fastest.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from trl import GRPOTrainer
from trl_common import StepClock, Turns, base_config, load_model, load_prompts, own_reward


class ForcedLengths(LogitsProcessor):
    """Ends row i with its `lengths[i]`-th new token.

    Args:
        lengths: (B) new tokens per row, including the end token.
        end_token: the id of the end token.
        prompt_length: tokens of each prompt.
    """

    def __init__(self, lengths: torch.Tensor, end_token: int, prompt_length: int) -> None:
        self._lengths = lengths
        self._end_token = end_token
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = self._lengths <= input_ids.shape[1] - self._prompt_length + 1
        scores[:, self._end_token] = -torch.inf
        scores[last] = -torch.inf
        scores[last, self._end_token] = 0.0
        return scores


def force_lengths(model: PreTrainedModel, lengths: list[int], end_token: int) -> None:
    """Make every later `generate` of the model write completions of these lengths."""
    generate = model.generate
    lengths_B = torch.tensor(lengths, device=model.device)

    def forced(input_ids: torch.Tensor, **options: Any) -> Any:
        processor = ForcedLengths(lengths_B, end_token, input_ids.shape[1])
        return generate(input_ids=input_ids, logits_processor=LogitsProcessorList([processor]), **options)

    model.generate = forced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="parquet file in Tandem's format")
    parser.add_argument("--lengths", required=True, help="JSON list: new tokens of each completion")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16-autocast", "bf16-pure"])
    parser.add_argument("--n", type=int, default=8, help="completions per prompt")
    parser.add_argument("--micro-batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--turns", action="store_true", help="take a step for each line of stdin")
    args = parser.parse_args()

    lengths = json.loads(Path(args.lengths).read_text())
    model = load_model(args.model, args.precision)
    clock = Turns() if args.turns else StepClock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=own_reward,
        train_dataset=load_prompts(args.prompts),
        args=base_config(
            args.precision,
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=len(lengths) // args.micro_batch,
            num_generations=args.n,
            max_completion_length=max(lengths),
            max_steps=args.warmup + args.steps,
            learning_rate=1e-6,
        ),
        callbacks=[clock],
    )
    force_lengths(model, lengths, trainer.processing_class.eos_token_id)
    trainer.train()

    measured = clock.seconds[args.warmup :]
    report = {
        "seconds_per_step": statistics.median(measured),
        "all_seconds": measured,
        "precision": args.precision,
        "micro_batch": args.micro_batch,
        "completions": len(lengths),
        "tokens": sum(lengths),
        "mean_length_seen": float(trainer.state.log_history[-1]["completions/mean_length"]),
        "parameters": sum(p.numel() for p in model.parameters()),
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
