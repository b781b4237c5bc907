"""A training step with the decoder layers and the head compiled, against the same step without, in one run.

Sequences of unequal length go through forward, backward and AdamW of Tandem's engine, with layers run again
in the backward pass as is the default. Turns alternate, so that both see the same machine; reported are the
best turns, in tokens per second of wall-clock. The compiled engine's first step, which waits for the
compiler, is told apart and is no turn; where an earlier run left kernels in the compiler's cache it is short.

    python benchmarks/compiled_step.py [--sizes 3.2M 107M] [--dtypes fp32 bf16] [--turns 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path

import torch
from rollout_vs_hf import SIZES
from train_step import MeanLogProb, seconds
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train.base import MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.protocol import DataProto, Ragged

SEQUENCES = {"3.2M": 192, "107M": 24}  # of a step
PROMPT, SHORTEST, LONGEST = 6, 24, 120


def make_engine(folder: Path, dtype: str, compiled: bool) -> FSDPEngine:
    return FSDPEngine(
        folder,
        model=BackboneConfig(path=str(folder)),
        fsdp=FSDPConfig(dtype=dtype, use_torch_compile=compiled),
        optim=OptimConfig(lr=1e-5),
        total_steps=1000,
        device=torch.device("cpu"),
    )


def make_batch(sequences: int, vocabulary: int) -> DataProto:
    torch.manual_seed(0)
    lengths = PROMPT + torch.randint(SHORTEST, LONGEST + 1, (sequences,))
    tokens = Ragged.from_lengths(torch.randint(0, vocabulary, (int(lengths.sum()),)), lengths)
    return DataProto({"tokens": tokens, "response_mask": tokens.with_values(tokens.positions() >= PROMPT)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SEQUENCES, default=list(SEQUENCES))
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {machine}")
    for size in options.sizes:
        shape = SIZES[size]
        batch = make_batch(SEQUENCES[size], shape["vocab_size"])
        tokens = len(batch.ragged("tokens").values)
        with tempfile.TemporaryDirectory() as name:
            config = Qwen2Config(**shape, tie_word_embeddings=True)
            AutoModelForCausalLM.from_config(config).save_pretrained(name)
            for dtype in options.dtypes:
                plain, compiled = (make_engine(Path(name), dtype, how) for how in (False, True))

                def step(engine: FSDPEngine, batch: DataProto = batch) -> None:
                    engine.train_step(batch, MeanLogProb(), micro=MicroBatching()).to_floats()

                first = [seconds(lambda e=e: step(e)) for e in (plain, compiled)]
                turns = [
                    [seconds(lambda e=e: step(e)) for e in (plain, compiled)] for _ in range(options.turns)
                ]
                before, after = (min(column) for column in zip(*turns, strict=True))
                row = {
                    "size": size,
                    "dtype": dtype,
                    "tokens": tokens,
                    "plain_tokens_per_s": round(tokens / before),
                    "compiled_tokens_per_s": round(tokens / after),
                    "ratio": round(before / after, 2),
                    "first_step_s": [round(value, 1) for value in first],
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
