"""Compare a training step with compiled decoder layers and head to the same step without.

Sequences of different lengths go through forward, backward and AdamW of Tandem's engine, with the default
recomputation of layers in the backward pass. The two engines take turns on the same machine. The result is
the best turn of each, in tokens per second of wall-clock time. The first step of the compiled engine includes
compilation. It is reported separately and does not count as a turn. It is short if the compiler's cache has
kernels of an earlier run.

    python benchmarks/compiled_step.py [--sizes 3.2M 107M] [--dtypes fp32 bf16] [--turns 3] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path

import torch
from device.rates import clock
from rollout_vs_hf import SIZES
from tiny import arguments
from train_step import MeanLogProb, describe
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.device import choose_device
from tandem.engines.train.base import MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.protocol import DataProto, Ragged

SEQUENCES = {"3.2M": 192, "107M": 24}  # sequences per step
PROMPT, SHORTEST, LONGEST = 6, 24, 120


def make_engine(folder: Path, dtype: str, compiled: bool, device: torch.device) -> FSDPEngine:
    return FSDPEngine(
        folder,
        model=BackboneConfig(path=str(folder)),
        fsdp=FSDPConfig(dtype=dtype, use_torch_compile=compiled),
        optim=OptimConfig(lr=1e-5),
        total_steps=1000,
        device=device,
    )


def make_batch(sequences: int, vocabulary: int) -> DataProto:
    torch.manual_seed(0)
    lengths = PROMPT + torch.randint(SHORTEST, LONGEST + 1, (sequences,))
    tokens = Ragged.from_lengths(torch.randint(0, vocabulary, (int(lengths.sum()),)), lengths)
    return DataProto({"tokens": tokens, "response_mask": tokens.with_values(tokens.positions() >= PROMPT)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SEQUENCES, default=list(SEQUENCES))
    parser.add_argument(
        "--dtypes", nargs="+", choices=("fp32", "bf16"), help="default: both on a CPU, bf16 on CUDA"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--turns", type=int, default=3)
    options = arguments(parser, sizes=["3.2M"], dtypes=["fp32"], turns=1)
    device = choose_device(options.device)
    dtypes = options.dtypes or (["fp32", "bf16"] if device.type == "cpu" else ["bf16"])
    print(f"torch {torch.__version__}, {describe(device)}")
    for size in options.sizes:
        shape = SIZES[size]
        batch = make_batch(4 if options.tiny else SEQUENCES[size], shape["vocab_size"])
        tokens = len(batch.ragged("tokens").values)
        with tempfile.TemporaryDirectory() as name:
            config = Qwen2Config(**shape, tie_word_embeddings=True)
            AutoModelForCausalLM.from_config(config).save_pretrained(name)
            for dtype in dtypes:
                plain, compiled = (make_engine(Path(name), dtype, how, device) for how in (False, True))

                def step(engine: FSDPEngine, batch: DataProto = batch) -> None:
                    engine.train_step(batch, MeanLogProb(), micro=MicroBatching()).to_floats()

                sides = [partial(step, engine) for engine in (plain, compiled)]
                first, *turns = [[clock(side, device) for side in sides] for _ in range(1 + options.turns)]
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
