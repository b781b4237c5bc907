"""Measure what packing and balancing save if responses have very different lengths.

Lengths are lognormal, capped at the longest, with a mean of a quarter of the longest. Half of the variance of
the logarithm is between prompts, half between the samples of one prompt.

Packing: useful tokens/s of an update (forward, backward, AdamW) of a 3.2M-parameter model, in turns:

packed     use_remove_padding=true, the default: sequences lie end to end.
padded     use_remove_padding=false: each micro-batch is a rectangle as wide as its longest sequence.
Sequences of
           similar length share a micro-batch, so there is little padding.
rectangle  each sequence is padded to the longest of the batch, as without packing and sorting.

Balancing: the largest share of tokens divided by the mean. This is measured for the ranks that share the rows
of an update (trainer.balance_batch), for the micro-batches under a token budget, and for the ranks that share
the prompts of a rollout, when the prompts are answered for the second time. "Before" has shares of equal
count in the given order. In each turn of micro-batches, all ranks wait for the slowest. "turns" is the sum
over the turns of the slowest rank's tokens, divided by a rank's mean tokens: once with each rank cutting its
own micro-batches, and once with a common number of micro-batches.

    python benchmarks/packing.py [--quick] [--device cpu] [--out FILE]

The program fails if a balanced division for an update is above 1.05, or if packing is less than twice as fast
as the rectangle, both by the clock and by processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from device.rates import synchronize
from rollout_vs_hf import SIZES, build
from tiny import arguments
from train_step import MeanLogProb, describe

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.device import choose_device
from tandem.engines.train.base import MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.engines.train.microbatch import cut
from tandem.protocol import DataProto, Ragged
from tandem.runtime.dispatch import Mesh, dispatch_batches, divide_batches
from tandem.runtime.index import Index
from tandem.trainer.dealing import Dealer

PROMPT, SAMPLES_OF_A_PROMPT = 16, 8
RANKS = (2, 4, 8)
BALANCED, FASTER = 1.05, 2.0


def draw_lengths(samples: int, longest: int, seed: int = 0, sigma: float = 1.0) -> np.ndarray:
    """Return the tokens of each response, shape (samples,), in the order of the prompts.

    Their mean is `longest` / 4.
    """
    prompts = np.random.default_rng(1).standard_normal(samples // SAMPLES_OF_A_PROMPT)
    own = np.random.default_rng([2, seed]).standard_normal(samples)
    drawn = np.exp(sigma * np.sqrt(0.5) * (prompts.repeat(SAMPLES_OF_A_PROMPT) + own))
    low, high = 0.0, float(longest)
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(scale * drawn, longest).mean() < longest / 4 else (low, scale)
    return np.maximum(1, np.minimum(low * drawn, longest)).astype(np.int64)


def make_batch(lengths: Sequence[int], *, widest: int | None = None) -> DataProto:
    """Make prompts of 16 tokens with responses of these lengths.

    With `widest`, each sequence is filled up to this length with tokens outside the mask.
    """
    whole = PROMPT + torch.tensor(lengths)
    held = torch.full_like(whole, widest) if widest else whole
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SIZES["3.2M"]["vocab_size"], (int(held.sum()),), generator=draw)
    tokens = Ragged.from_lengths(ids, held)
    places = tokens.positions()
    mask = (places >= PROMPT) & (places < whole.repeat_interleave(held))
    return DataProto({"tokens": tokens, "response_mask": tokens.with_values(mask)})


def steps(
    folder: Path, lengths: Sequence[int], dtype: str, micro: int, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """Return a function for each of the three ways, which takes one update."""
    longest = PROMPT + max(lengths)
    ragged, rectangle = make_batch(lengths), make_batch(lengths, widest=longest)
    ways = {"packed": (True, ragged), "padded": (False, ragged), "rectangle": (True, rectangle)}

    def step(packs: bool, batch: DataProto) -> Callable[[], Any]:
        engine = FSDPEngine(
            folder,
            model=BackboneConfig(
                path=str(folder), enable_gradient_checkpointing=False, use_remove_padding=packs
            ),
            fsdp=FSDPConfig(dtype=dtype),
            optim=OptimConfig(),
            total_steps=1000,
            device=device,
        )
        return lambda: engine.train_step(batch, MeanLogProb(), micro=MicroBatching(max_samples=micro))

    return {name: step(*way) for name, way in ways.items()}


def packing(
    dtype: str, samples: int, longest: int, micro: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    lengths = draw_lengths(samples, longest - PROMPT).tolist()
    with tempfile.TemporaryDirectory() as folder:
        build("3.2M", torch.float32, torch.device("cpu")).save_pretrained(folder)
        ways = steps(Path(folder), lengths, dtype, micro, device)
        for step in ways.values():
            step()
        turns = [{name: timed(step, device) for name, step in ways.items()} for _ in range(rounds)]
    useful = sum(lengths) + PROMPT * samples
    seconds, cpu = (
        {name: statistics.median(turn[name][index] for turn in turns) for name in ways} for index in (0, 1)
    )
    return {
        "dtype": dtype,
        "samples": samples,
        "longest": longest,
        "micro_batch": micro,
        "useful_tokens": useful,
        "tokens_per_s": {name: useful / took for name, took in seconds.items()},
        "packed_over": {name: seconds[name] / seconds["packed"] for name in ("padded", "rectangle")},
        "packed_over_by_cpu": {name: cpu[name] / cpu["packed"] for name in ("padded", "rectangle")},
    }


def timed(step: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    synchronize(device)
    began, began_cpu = time.perf_counter(), time.process_time()
    step()
    synchronize(device)
    return time.perf_counter() - began, time.process_time() - began_cpu


def imbalance(totals: Sequence[int]) -> float:
    return max(totals) / float(np.mean(totals))


def balancing(samples: int, longest: int, ranks: int, budget: int) -> dict[str, Any]:
    """Measure the balance of the functions that divide a batch over workers and cut micro-batches."""
    lengths = draw_lengths(samples, longest - PROMPT)
    batch = DataProto({"tokens": Ragged.from_lengths(torch.zeros(int(lengths.sum())), torch.tensor(lengths))})
    mesh = Mesh.flat(ranks)
    plain = shares(dispatch_batches(mesh, (batch,), {}))
    even = shares(divide_batches(mesh, (batch,), {}, "tokens")[0])
    micro = MicroBatching(max_tokens=budget)
    alone = [cut(share, micro) for share in even]
    most = max(map(len, alone))
    alike = [cut(share, micro, at_least=most) for share in even]
    of_alike = [
        [sum(share[row] for row in rows) for rows in parts] for share, parts in zip(even, alike, strict=True)
    ]
    counted = cut(plain[0], MicroBatching(max_samples=-(-samples // ranks // most)))
    return {
        "ranks": ranks,
        "samples": samples,
        "longest": longest,
        "budget": budget,
        "ranks_before": imbalance([sum(share) for share in plain]),
        "ranks_after": imbalance([sum(share) for share in even]),
        "micro_batches_before": imbalance([sum(plain[0][row] for row in rows) for rows in counted]),
        "micro_batches_after": imbalance([total for totals in of_alike for total in totals]),
        "turns_alone": turns(even, alone),
        "turns_alike": turns(even, alike),
        "prompts_before": prompts_dealt(samples, longest, ranks, learns=False),
        "prompts_after": prompts_dealt(samples, longest, ranks, learns=True),
    }


def shares(calls: Sequence[Any]) -> list[list[int]]:
    """Return the row lengths of each rank."""
    return [args[0].ragged("tokens").lengths.tolist() for args, _ in calls]


def turns(of_ranks: Sequence[Sequence[int]], cuts: Sequence[Sequence[Sequence[int]]]) -> float:
    """Return the tokens of the slowest rank summed over turns, divided by a rank's mean tokens."""
    tokens = np.zeros((len(cuts), max(map(len, cuts))))
    for rank, (lengths, parts) in enumerate(zip(of_ranks, cuts, strict=True)):
        for turn, rows in enumerate(parts):
            tokens[rank, turn] = sum(lengths[row] for row in rows)
    return float(tokens.max(0).sum() / tokens.sum(1).mean())


def prompts_dealt(samples: int, longest: int, ranks: int, *, learns: bool) -> float:
    """Return the imbalance of the tokens that ranks write for their prompts in a second epoch."""
    count = samples // SAMPLES_OF_A_PROMPT
    prompts = index([f"1-{row}" for row in range(count)], "prompts", [PROMPT] * count)
    first, second = (draw_lengths(samples, longest - PROMPT, seed) for seed in (0, 1))
    dealer = Dealer()
    if learns:
        uids = [f"0-{row}" for row in range(count)]
        answers = index([uid for uid in uids for _ in range(SAMPLES_OF_A_PROMPT)], "tokens", PROMPT + first)
        dealer.learn(index(uids, "prompts", [PROMPT] * count), answers)
    order = dealer.order(prompts, ranks)
    assert order is not None
    written = second.reshape(count, SAMPLES_OF_A_PROMPT).sum(1)
    return imbalance([int(written[rows.numpy()].sum()) for rows in torch.tensor_split(order, ranks)])


def index(uids: Sequence[str], column: str, lengths: Any) -> Index:
    sizes = torch.as_tensor(lengths)
    return Index.of(
        DataProto({column: Ragged.from_lengths(torch.zeros(int(sizes.sum())), sizes)}, {"uid": list(uids)})
    )


KINDS = ("ranks", "micro_batches", "prompts")
UPDATES = "| dtype | packed tok/s | padded | rectangle | over padded | over rectangle | by CPU time |"
DIVISIONS = "| samples | ranks | budget | ranks | micro-batches | turns alone | alike | rollout's prompts |"


def report(found: dict[str, Any]) -> list[str]:
    """Print the tables and return the failures."""
    failures = []
    print(UPDATES, "|---|---|---|---|---|---|---|", sep="\n")
    for row in found["packing"]:
        rates = [f"{row['tokens_per_s'][name]:,.0f}" for name in ("packed", "padded", "rectangle")]
        over, cpu = row["packed_over"], row["packed_over_by_cpu"]
        ratios = [f"{over[name]:.2f}" for name in over] + [", ".join(f"{cpu[name]:.2f}" for name in cpu)]
        print(f"| {' | '.join([row['dtype'], *rates, *ratios])} |")
        if over["rectangle"] < FASTER and cpu["rectangle"] < FASTER:
            failures.append(f"packing in {row['dtype']}: {over['rectangle']:.2f} times the rectangle")
    print("", DIVISIONS, "|---|---|---|---|---|---|---|---|", sep="\n")
    for row in found["balancing"]:
        ranks, micro, prompts = (f"{row[f'{k}_before']:.3f} → {row[f'{k}_after']:.3f}" for k in KINDS)
        turns = [f"{row[name]:.3f}" for name in ("turns_alone", "turns_alike")]
        sizes = [f"{row[name]:,}" for name in ("samples", "ranks", "budget")]
        print(f"| {' | '.join([*sizes, ranks, micro, *turns, prompts])} |")
        for name in ("ranks_after", "micro_batches_after", "turns_alike"):
            if row[name] > BALANCED:
                failures.append(f"{name} {row[name]:.3f} of {row['samples']} samples on {row['ranks']} ranks")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=64, help="samples of an update")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest sequence")
    parser.add_argument("--micro-batch", type=int, default=16, help="samples per micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="a quarter of the samples, one round, one dtype")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto; on CUDA only bf16 is measured")
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    options = arguments(parser, quick=True, samples=32, longest=64, micro_batch=4, threads=1)
    torch.set_num_threads(options.threads)
    samples = options.samples // 4 if options.quick else options.samples
    device = choose_device(options.device)
    rounds = 1 if options.quick else options.rounds
    dtypes = ["bf16"] if device.type == "cuda" else ["fp32"] if options.quick else ["bf16", "fp32"]
    found: dict[str, Any] = {
        "packing": [
            packing(kind, samples, options.longest, options.micro_batch, rounds, device) for kind in dtypes
        ],
        "balancing": [
            balancing(count, 8192, ranks, budget)
            for count in ((256,) if options.tiny else (256, 512, 1024))
            for ranks in RANKS
            for budget in (16384, 32768)
        ],
    }
    failures = found["failures"] = report(found)
    found["machine"] = {
        "processor": platform.machine(),
        "device": describe(device),
        "threads": options.threads,
        "load": os.getloadavg()[0],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": " ".join(["python benchmarks/packing.py", *sys.argv[1:]]),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    if failures and not options.tiny:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
