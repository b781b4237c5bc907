"""Compare tokens/s of the policy update alone: Tandem, TRL and plain transformers, in one run.

The update is GRPO's on given rollouts: forward, backward, clipping and AdamW over one batch. Nothing is
generated. All sides get the same model, tokens and advantages, and the norms of their gradients are compared.

tandem        The training engine with the loss of its policy update. In bf16 it keeps fp32 weights.
trl           TRL 1.16.0's GRPO trainer with the given rollouts. In bf16 its weights are bf16.
transformers  The plain loop: padded batches, all logits at once, log-softmax, fused AdamW. In bf16 its
              weights are bf16.

In the mode "equal" every completion has the longest length, so no side can save padding. In the mode "spread"
lengths go from a sixteenth of the longest to all of it. Each side runs in its own process with the fastest of
several micro-batch sizes, which a trial finds by processor time (on CUDA by wall-clock time). Then the sides
take turns, and the medians are compared: wall-clock time, and processor time over all threads, which other
programs disturb less (with `--threads 1`). Useful tokens are the tokens of prompts and completions, without
padding.

    python benchmarks/update_vs_trl.py [--sizes 3.2M 107M] [--dtypes bf16 fp32] [--modes equal spread]
        [--quick] [--device cpu] [--out FILE]

On CUDA all sides use the device, TRL's too if its environment has PyTorch's CUDA build, and the default dtype
is only bf16. Each row is written as soon as it is measured; other rows of an existing file are kept. TRL runs
in its own environment; create it with `make peers`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from device.rates import synchronize
from peers.sides import Side, serve
from rollout_vs_hf import SIZES, build
from tiny import arguments, peer
from transformers import AutoModelForCausalLM

from tandem.config.actor import ActorConfig
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.config.optim import OptimConfig
from tandem.demo.model import build_tokenizer
from tandem.device import choose_device
from tandem.engines.train.base import MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.protocol import DataProto, Ragged
from tandem.workers.losses import ActorLoss

HERE = Path(__file__).resolve().parent
TRL = HERE.parent / ".peers" / "trl" / "bin" / "python"
SIDES = ("tandem", "trl", "transformers")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MODES = ("equal", "spread")


@dataclass(frozen=True)
class Work:
    """The size of the work, and the micro-batch sizes to try.

    Attributes:
        samples: samples in the batch.
        prompt: tokens of a prompt.
        longest: tokens of the longest completion.
        micro: samples per micro-batch that padded sides try.
        tokens: tokens per micro-batch that Tandem tries.
    """

    samples: int
    prompt: int
    longest: int
    micro: tuple[int, ...]
    tokens: tuple[int, ...]


WORK = {
    "3.2M": Work(256, 6, 64, (256, 64, 32), (2048, 4096)),
    "107M": Work(16, 16, 112, (16, 8, 4), (1024, 2048)),
}


def make_rollouts(work: Work, mode: str, vocabulary: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    shortest = work.longest // 16
    spread = [shortest + (i * 37) % (work.longest - shortest + 1) for i in range(work.samples)]
    lengths = spread if mode == "spread" else [work.longest] * work.samples
    return {
        "prompts": torch.randint(2, vocabulary, (work.samples, work.prompt), generator=draw).tolist(),
        "completions": [torch.randint(2, vocabulary, (n,), generator=draw).tolist() for n in lengths],
        # small advantages, so that no side clips its gradients before their norm is measured
        "advantages": (0.1 * torch.randn(work.samples, generator=draw)).tolist(),
    }


class TandemSide:
    def open(
        self, folder: str, rollouts: dict[str, Any], precision: str, micro: int, device: torch.device
    ) -> None:
        self._batch = make_batch(rollouts)
        self._loss = ActorLoss.from_config(ActorConfig(), recomputed=False)
        self._micro = MicroBatching(max_tokens=micro)
        self._engine = FSDPEngine(
            folder,
            model=BackboneConfig(path=folder, enable_gradient_checkpointing=False),
            fsdp=FSDPConfig(dtype=precision),
            optim=OptimConfig(lr=1e-6),
            total_steps=1000,
            device=device,
        )

    def step(self) -> float:
        """Take a step; return the norm of the gradient."""
        metrics = self._engine.train_step(self._batch, self._loss, micro=self._micro)
        return metrics.to_floats()["grad_norm"]


def make_batch(rollouts: dict[str, Any]) -> DataProto:
    pairs = zip(rollouts["prompts"], rollouts["completions"], strict=True)
    tokens = Ragged.from_list([prompt + completion for prompt, completion in pairs], dtype=torch.int64)
    mask = tokens.positions() >= len(rollouts["prompts"][0])
    advantages = torch.tensor(rollouts["advantages"]).repeat_interleave(tokens.lengths)
    columns = {"response_mask": mask, "advantages": advantages}
    return DataProto(
        {"tokens": tokens} | {name: tokens.with_values(values) for name, values in columns.items()}
    )


class TransformersSide:
    def open(
        self, folder: str, rollouts: dict[str, Any], precision: str, micro: int, device: torch.device
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision])
        self._model = model.to(device).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        batch = make_batch(rollouts)
        tokens = batch.ragged("tokens")
        self._ids = tokens.to_padded().to(device)
        self._attend = tokens.with_values(torch.ones_like(tokens.values)).to_padded().to(device)
        self._mask = batch.ragged("response_mask").to_padded().bool()[:, 1:].to(device)
        self._advantages = torch.tensor(rollouts["advantages"], device=device).unsqueeze(1)
        self._micro = micro

    def step(self) -> float:
        """Take a step; return the norm of the gradient."""
        for rows in torch.arange(len(self._ids)).split(self._micro):
            ids, attend, mask = self._ids[rows], self._attend[rows], self._mask[rows]
            full = bool(attend.all())
            logits = self._model(ids, attention_mask=None if full else attend, use_cache=False).logits
            log_p = torch.log_softmax(logits[:, :-1].float(), -1)
            picked = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
            ratio, advantages = (picked - picked.detach()).exp(), self._advantages[rows]
            surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (-(surrogate * mask).sum() / self._mask.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)


class Timed:
    """A side in this environment, with the same interface as the peers."""

    def __init__(self, side: TandemSide | TransformersSide) -> None:
        self._side = side
        self._norm = 0.0

    def open(self, threads: int, device: str, **work: Any) -> dict[str, str]:
        torch.set_num_threads(threads)
        self._device = choose_device(device)
        self._side.open(device=self._device, **work)
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def step(self) -> dict[str, float]:
        """Take a step; return wall-clock and CPU seconds, and the norm of the first step's gradient."""
        began, began_cpu = time.perf_counter(), time.process_time()
        norm = self._side.step()
        synchronize(self._device)
        took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - began_cpu}
        self._norm = self._norm or norm
        return took | {"gradient_norm": self._norm}


def start(name: str, folder: Path) -> Side:
    own = [sys.executable, __file__, "--side", name]
    command = [str(TRL), str(HERE / "peers" / "trl_update.py")] if name == "trl" else own
    return Side(command, folder / f"{name}.log")


def fastest(name: str, settings: tuple[int, ...], logs: Path, **work: Any) -> tuple[Side, dict[str, Any]]:
    """Start a side at its fastest micro-batch size, warmed up; return it with the results of the trial."""
    best: tuple[float, Side, dict[str, Any]] | None = None
    kind = "seconds" if work["device"] == "cuda" else "cpu_seconds"
    tried = {}
    for micro in settings:
        side = start(name, logs)
        versions = side.ask("open", micro=micro, **work)
        norm = side.ask("step")["gradient_norm"]
        took = tried[str(micro)] = side.ask("step")[kind]
        if best is not None and took >= best[0]:
            side.close()
            continue
        if best is not None:
            best[1].close()
        best = took, side, {"micro_batch": micro, "versions": versions, "gradient_norm": norm}
    assert best is not None
    return best[1], best[2] | {f"trial_{kind}": tried}


def compare(size: str, dtype: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    work = replace(WORK[size], samples=16, micro=(16,)) if options.tiny else WORK[size]
    rollouts = make_rollouts(work, mode, SIZES[size]["vocab_size"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(size, torch.float32, torch.device("cpu")).save_pretrained(folder / "model")
        build_tokenizer().save_pretrained(folder / "model")
        sides, found = {}, {}
        for side in options.sides:
            given = {"rollouts": rollouts, "folder": str(folder / "model"), "threads": options.threads}
            given |= {"device": options.device}
            given["precision"] = "bf16-pure" if side == "trl" and dtype == "bf16" else dtype
            settings = work.tokens if side == "tandem" else work.micro
            settings = settings[:1] if options.quick else settings
            sides[side], found[side] = fastest(side, settings, folder, **given)
        rounds = [{name: side.ask("step") for name, side in sides.items()} for _ in range(options.rounds)]
        for side in sides.values():
            side.close()
    useful = work.samples * work.prompt + sum(map(len, rollouts["completions"]))
    for name, row in found.items():
        for kind in ("seconds", "cpu_seconds"):
            row[f"all_{kind}"] = [turn[name][kind] for turn in rounds]
            row[kind] = statistics.median(row[f"all_{kind}"])
        row["tokens_per_s"] = useful / row["seconds"]
    return {"size": size, "dtype": dtype, "mode": mode, "useful_tokens": useful, "sides": found}


def add_ratios(row: dict[str, Any]) -> None:
    sides = row["sides"]
    row["tandem_over"] = {
        kind: {name: side[kind] / sides["tandem"][kind] for name, side in sides.items() if name != "tandem"}
        for kind in ("seconds", "cpu_seconds")
    }
    norms = [side["gradient_norm"] for side in sides.values()]
    row["norms_differ_by"] = max(norms) / min(norms) - 1
    assert max(norms) < 1 and row["norms_differ_by"] < 0.05, norms


def report(row: dict[str, Any]) -> None:
    parts = [f"{row['size']:>5} {row['dtype']} {row['mode']:>6}:"]
    parts += [
        f"{name} {side['tokens_per_s']:,.0f} tok/s (micro-batch {side['micro_batch']})"
        for name, side in row["sides"].items()
    ]
    for name, ratio in row["tandem_over"]["seconds"].items():
        parts.append(
            f"tandem / {name} {ratio:.2f}, of CPU time {row['tandem_over']['cpu_seconds'][name]:.2f}"
        )
    print("  ".join(parts) + f"  norms within {row['norms_differ_by']:.1%}", flush=True)


def write(path: Path, row: dict[str, Any]) -> None:
    """Write the row to the file; it replaces an earlier row."""
    cell = ("size", "dtype", "mode")
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    table = {tuple(each[name] for name in cell): each for each in [*old, row]}
    path.write_text(json.dumps({"rows": [table[key] for key in sorted(table)]}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(DTYPES), help="default: both on a CPU, bf16 on CUDA"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="one micro-batch size for each side")
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = arguments(parser, sizes=["3.2M"], dtypes=["fp32"], modes=["spread"], rounds=1, quick=True)
    if options.side is not None:
        timed = Timed(TandemSide() if options.side == "tandem" else TransformersSide())
        serve({"open": timed.open, "step": timed.step})
        return
    if "trl" in options.sides and not peer("trl", tiny=options.tiny):
        options.sides = [name for name in options.sides if name != "trl"]
    dtypes = options.dtypes or (["bf16"] if options.device == "cuda" else list(DTYPES))
    for size, dtype, mode in itertools.product(options.sizes, dtypes, options.modes):
        row = compare(size, dtype, mode, options)
        add_ratios(row)
        report(row)
        row["machine"] = {
            "processor": platform.machine(),
            "device": options.device,
            "threads": options.threads,
            "load": os.getloadavg()[0],
            "command": " ".join(["python benchmarks/update_vs_trl.py", *sys.argv[1:]]),
        }
        if options.out is not None:
            write(options.out, row)


if __name__ == "__main__":
    main()
