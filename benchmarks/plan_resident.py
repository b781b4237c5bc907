"""Compare the resident memory of log-prob passes and updates on a CPU with `tandem.memory`.

The memory counts beyond weights and optimizer state. Each measurement runs in its own process, after one pass
to warm up.

    python benchmarks/plan_resident.py [--sizes 3.2M 30M 107M] [--out FILE]

The error is a share of the total: weights, optimizer state and the growth. The program fails if an error is
above 15%.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lever_rows import growth
from rollout_vs_hf import SIZES, build
from tiny import arguments
from train_step import MeanLogProb

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train.base import MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.memory.activations import Setup
from tandem.memory.gathered import Gathered
from tandem.memory.shapes import model_shape
from tandem.memory.training import CPU_TILE, Way, forward_moments, update_moments, worst
from tandem.models.parallel import leave_distributed
from tandem.protocol import DataProto, Ragged

OUT = Path(__file__).parent / "results" / "plan_resident.json"
CASES = [
    *((size, "fp32", mode, 8, 1) for size in SIZES for mode in ("none", "full")),
    *((size, "bf16", "full", 4, 1) for size in ("30M", "107M")),
    *((size, "fp32", "none", 4, 2) for size in ("3.2M", "30M")),
]
LENGTH, WORST = 513, 0.15


def measured(size: str, precision: str, mode: str, sequences: int) -> dict[str, float]:
    """Return this rank's bytes, for two micro-batches of this number of sequences."""
    checkpointing = {"enable_gradient_checkpointing": mode != "none"}
    checkpointing |= {} if mode == "none" else {"gradient_checkpointing_mode": mode}
    with tempfile.TemporaryDirectory() as folder:
        build(size, torch.float32, torch.device("cpu")).save_pretrained(folder)
        engine = FSDPEngine(
            folder,
            model=BackboneConfig(path=folder, **checkpointing),
            fsdp=FSDPConfig(dtype=precision),
            optim=OptimConfig(lr=1e-5),
            total_steps=10,
            device=torch.device("cpu"),
        )
    rows = [torch.randint(0, SIZES[size]["vocab_size"], (LENGTH,)) for _ in range(2 * sequences)]
    tokens = Ragged.from_list(rows)
    batch = DataProto({"tokens": tokens, "response_mask": tokens.with_values(tokens.positions() > 8)})
    micro = MicroBatching(max_samples=sequences)

    def log_prob() -> object:
        return engine.forward(batch, outputs=frozenset({"log_probs"}), micro=micro)

    def update() -> object:
        return engine.train_step(batch, MeanLogProb(), micro=micro)

    log_prob(), update()
    found = {"log_prob": growth(log_prob), "update": growth(update)}
    found["state"] = sum(value for name, value in engine.state_info().items() if "@" in name)
    leave_distributed(together=True)
    return found


def predicted(size: str, precision: str, mode: Any, sequences: int, ranks: int) -> dict[str, float]:
    shape = model_shape({"model_type": "qwen2", "tie_word_embeddings": True, **SIZES[size]})
    own = Gathered.of(shape)
    setup = Setup(itemsize=2 if precision == "bf16" else 4)
    way = Way(setup, 4, ranks, micro_batches=2, entropy=True, tile=CPU_TILE)
    tokens = sequences * (LENGTH - 1)
    update = update_moments(own, shape.decoder, replace(way, mode=mode), tokens)
    return {
        "log_prob": worst(forward_moments(own, shape.decoder, replace(way, entropy=False), tokens)).total,
        "update": worst(update).total,
        "state": 12 * own.whole / ranks,
    }


def run(size: str, precision: str, mode: str, sequences: int, ranks: int) -> dict[str, float]:
    """Run all ranks; return the measurement of the first rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, __file__, "--case", size, precision, mode, str(sequences)]
    own = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    if ranks > 1:
        own |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | own | ({"RANK": str(rank)} if ranks > 1 else {}),
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=3600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank of {size} {precision} {mode} failed")
    return dict(json.loads(outputs[0].splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", nargs=4)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--out", type=Path, default=OUT)
    options = arguments(parser, sizes=["3.2M"])
    if options.case:
        size, precision, mode, sequences = options.case
        print(json.dumps(measured(size, precision, mode, int(sequences))))
        return 0
    rows, most = [], 0.0
    cases = [case for case in CASES if case[0] in options.sizes]
    for case in cases[:1] if options.tiny else cases:
        found, told = run(*case), predicted(*case)
        errors = {
            phase: (told[phase] + told["state"]) / (found[phase] + found["state"]) - 1
            for phase in ("log_prob", "update")
        }
        rows.append({"case": case, "measured": found, "predicted": told, "errors": errors})
        most = max(most, *map(abs, errors.values()))
        sizes = {phase: f"{found[phase] / 2**20:.0f}/{told[phase] / 2**20:.0f} MiB" for phase in found}
        print(*case, sizes, {phase: f"{error:+.1%}" for phase, error in errors.items()}, flush=True)
    options.out.write_text(
        json.dumps({"torch": torch.__version__, "worst": most, "rows": rows}, indent=1) + "\n"
    )
    print(f"worst error: {most:.1%}")
    return 0 if most <= WORST or options.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
