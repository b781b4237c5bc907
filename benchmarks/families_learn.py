"""Train a policy of each of some architectures on the demo's task, and record its accuracy before and after.

The models have about a million parameters, like the demo's own. Windows are shorter than the sequences. The
seconds include the warm start. Runs of a mixture of experts also record the load of its experts.

    python benchmarks/families_learn.py [RUN …] [--steps 50] [--seed 0] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from demo_tasks import device, measure
from tiny import arguments, small_demo
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tandem.demo.gym import ARITHMETIC
from tandem.demo.model import build_tokenizer

SHAPE = {
    **{"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": True},
    **{"initializer_range": 128**-0.5, "bos_token_id": None},
}
WINDOW = {"sliding_window": 12}
MIXED = {
    **WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        **MIXED,
        **{"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128},
    },
    "gemma3_text": {**MIXED, "head_dim": 32},
    "olmo3": MIXED,
    "phi3": WINDOW,
    "qwen3_moe": {
        **{"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    },
}
BALANCED = "qwen3_moe balanced"
RUNS: dict[str, list[str]] = {
    **{kind: [] for kind in FAMILIES},
    BALANCED: ["actor_rollout_ref.model.mixture.router_aux_loss_coef=0.01"],
}
"""The words of each run for reinforcement learning. The warm start has none of them."""
LOADS = ("router/load_max", "router/load_min", "router/idle_experts")


def write_model(kind: str, folder: Path, *, seed: int, phrases: tuple[str, ...] = ()) -> None:
    """Save a model of an architecture with the demo's tokenizer and random weights."""
    tokenizer = build_tokenizer(phrases)
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = CONFIG_MAPPING[kind](**{**SHAPE, **ends, "vocab_size": len(tokenizer), **FAMILIES[kind]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help=f"by default {', '.join(RUNS)}")
    parser.add_argument("--steps", type=int, default=50, help="steps of reinforcement learning")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/families_learn.json"))
    given = arguments(parser, families=[BALANCED], steps=1)
    found = json.loads(given.out.read_text()) if given.out.exists() else {"families": {}}
    found["device"] = device()
    for name in given.families or RUNS:
        with (
            small_demo() if given.tiny else nullcontext(),
            mock.patch("tandem.demo.program.write_model", partial(write_model, name.split()[0])),
        ):
            words = [f"trainer.total_training_steps={given.steps}", *RUNS[name]]
            row = measure(ARITHMETIC, given.seed, words, metrics=LOADS)
        found["families"][name] = row
        print(json.dumps({name: row}))
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
