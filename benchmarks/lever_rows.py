"""Measure one row of the table of levers.py, with a new process for each rank."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging as transformers_logging

from tandem.config.actor import ActorConfig
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import ModelConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train.base import Counts, MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.engines.train.shards import gathered
from tandem.engines.train.state import TrainState
from tandem.lifetime import THREADLESS, threads
from tandem.models.activation_offload import SameStream
from tandem.models.collectives import CollectiveMeter
from tandem.models.parallel import leave_distributed
from tandem.protocol import DataProto, Ragged
from tandem.workers.losses import ActorLoss

Options = Mapping[str, Mapping[str, Any]]
Gradients = dict[str, dict[str, Tensor]]
"""Gradients by precision and name of the weight."""

PRECISIONS = {
    "fp64": {"model_dtype": "fp64", "dtype": "fp64"},
    "fp32": {"model_dtype": "fp32", "dtype": "fp32"},
    "bf16": {"model_dtype": "fp32", "dtype": "bf16"},
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
LIMIT_S = 300
PRELOADED = ["transformers.models.qwen2.modeling_qwen2", "tandem.engines.train.fsdp", "torch.profiler"]


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batch.

    Attributes:
        vocabulary, hidden, intermediate, layers: the sizes of the model.
        samples: sequences in the batch.
        longest: tokens of the longest sequence.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    samples: int
    longest: int

    def save(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=self.longest,
            initializer_range=0.5 * self.hidden**-0.5,
            tie_word_embeddings=True,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)

    def batch(self, dtype: torch.dtype = torch.float32) -> DataProto:
        """Make unsorted sequences from an eighth of the longest length to all of it, with holes in masks."""
        draw = torch.Generator().manual_seed(0)
        short = self.longest // 8
        lengths = short + torch.arange(self.samples) * 37 % (self.longest - short + 1)
        lengths[self.samples // 2] = self.longest
        total = int(lengths.sum())
        tokens = Ragged.from_lengths(torch.randint(0, self.vocabulary, (total,), generator=draw), lengths)
        mask = (tokens.positions() >= 2) & (torch.rand(total, generator=draw) < 0.9)
        noise = torch.randn(2, total, generator=draw, dtype=torch.float64).to(dtype)
        columns = {"response_mask": mask, "advantages": noise[0], "ref_log_probs": 0.3 * noise[1] - 3}
        return DataProto({"tokens": tokens} | {k: tokens.with_values(v) for k, v in columns.items()})


SMALL = Size(vocabulary=61, hidden=32, intermediate=48, layers=3, samples=10, longest=256)
LARGE = {
    "cpu": Size(vocabulary=8192, hidden=256, intermediate=768, layers=6, samples=8, longest=256),
    "cuda": Size(vocabulary=65536, hidden=1024, intermediate=3072, layers=16, samples=64, longest=2048),
}
SPEED_PRECISION = {"cpu": "fp32", "cuda": "bf16"}


class RowFailed(RuntimeError):
    """Raised if a rank of a row fails or does not end."""


def save_models(folder: Path, device: str) -> None:
    transformers_logging.disable_progress_bar()
    SMALL.save(folder / "small")
    LARGE[device].save(folder / "large")


def make_loss() -> ActorLoss:
    """Return the loss of a policy update with a clipped ratio, an entropy bonus and a KL term."""
    return ActorLoss.from_config(
        ActorConfig(entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.1), recomputed=False
    )


def reference(folder: Path, device: str) -> Gradients:
    """Return the gradients of transformers' own model, one sequence at a time, with all logits."""
    return {precision: _reference(folder / "small", DTYPES[precision], device) for precision in PRECISIONS}


def _reference(folder: Path, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
    wide = torch.promote_types(dtype, torch.float32)
    batch, loss = SMALL.batch(wide), make_loss()
    tokens, mask = batch.ragged("tokens"), batch.ragged("response_mask")
    counts = Counts(tokens=int(mask.values.sum()), sequences=len(mask))
    log_probs, entropy = [], []
    for ids in tokens:
        ids = ids.to(device)
        log_p = torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1].to(wide), -1)
        first = log_p.new_zeros(1)
        log_probs.append(torch.cat([first, log_p.gather(1, ids[1:, None])[:, 0]]))
        entropy.append(torch.cat([first, -(log_p.exp() * log_p).sum(-1)]))
    columns = {name: batch.ragged(name).values.to(device) for name in loss.columns}
    wanted = columns["response_mask"]
    out = {"log_probs": torch.cat(log_probs) * wanted, "entropy": torch.cat(entropy) * wanted}
    loss(out, columns, tokens.offsets.to(device), counts)[0].backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def make_engine(folder: Path, options: Options, precision: str, device: str) -> FSDPEngine:
    plain = {"path": str(folder), "enable_gradient_checkpointing": False}
    return FSDPEngine(
        folder,
        model=ModelConfig(**{**plain, **options.get("model", {})}),
        fsdp=FSDPConfig(**{**PRECISIONS[precision], **options.get("fsdp", {})}),
        optim=OptimConfig(**options.get("optim", {})),
        total_steps=1000,
        device=torch.device(device),
        **options.get("engine", {}),
    )


def update(engine: FSDPEngine, batch: DataProto, options: Options) -> dict[str, float]:
    """Take one step over this rank's rows, with onload before the step and offload after it."""
    rows = list(range(engine.share.rank, len(batch), engine.share.size))
    engine.onload(optimizer=True)
    metrics = engine.train_step(batch[rows], make_loss(), micro=MicroBatching(**options.get("micro", {})))
    engine.offload()
    return metrics.to_floats()


def gradients(folder: Path, options: Options, precision: str, device: str) -> dict[str, Tensor]:
    """Return the whole gradient by weight, before clipping; the weights do not change."""
    engine = make_engine(folder, options, precision, device)
    offload = engine.activation_offload
    if device == "cpu" and offload is not None:
        offload.lane, offload.min_bytes = SameStream(), 0
    taken: dict[str, Tensor] = {}

    def take(state: TrainState, *_: Any) -> None:
        for name, parameter in state.named().items():
            if parameter.grad is not None:
                whole = gathered(parameter.grad, parameter.grad.dtype, CollectiveMeter())
                taken[name] = whole.detach().cpu().clone()

    dtype = torch.float64 if precision == "fp64" else torch.float32
    with mock.patch.object(TrainState, "step", take):
        update(engine, SMALL.batch(dtype), options)
    return taken


def costs(folder: Path, options: Options, device: str, steps: int) -> dict[str, Any]:
    """Return the memory and seconds of a step on this rank."""
    size = LARGE[device]
    engine, batch = make_engine(folder, options, SPEED_PRECISION[device], device), size.batch()
    resident = growth(lambda: update(engine, batch, options)) if device == "cpu" else 0
    peak, metrics = (_cpu_peak if device == "cpu" else _cuda_peak)(lambda: update(engine, batch, options))
    seconds = []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        update(engine, batch, options)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    engine.onload(optimizer=True)
    held = {name: value for name, value in engine.state_info().items() if "@" in name}
    fsdp = options.get("fsdp", {})
    leaves = {"parameters": fsdp.get("param_offload"), "optimizer": fsdp.get("optimizer_offload")}
    of_device = {name: value for name, value in held.items() if name.partition("@")[2].startswith(device)}
    moved = sum(value for name, value in of_device.items() if leaves[name.partition("@")[0]])
    return {
        "peak_bytes": peak,
        "resident_bytes": resident,
        "state_bytes": sum(of_device.values()),
        "moved_bytes": moved + metrics.get("activation_offload_bytes", 0) / engine.share.size,
        "seconds": min(seconds),
        "tokens": len(batch.ragged("tokens").values),
    }


def _cpu_peak(work: Callable[[], dict[str, float]]) -> tuple[int, dict[str, float]]:
    """Return the peak of allocated bytes above the start, by the allocator's reports."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as recorded:
        metrics = work()
    events = recorded.profiler.kineto_results.events()
    live = most = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        live += nbytes
        most = max(most, live)
    return most, metrics


def _cuda_peak(work: Callable[[], dict[str, float]]) -> tuple[int, dict[str, float]]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    metrics = work()
    return torch.cuda.max_memory_allocated() - before, metrics


def growth(work: Callable[[], object]) -> int:
    """Return the peak of resident memory above the start (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(kind: str) -> int:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found.group(1))


def measure(
    folder: Path, options: Options, ranks: int, precisions: tuple[str, ...], device: str, steps: int
) -> tuple[dict[str, Any], Gradients]:
    """Return a row's costs (the largest of its ranks) and its gradients.

    Raises:
        RowFailed: a rank failed.
    """
    os.environ.update(THREADLESS)  # the fork server must have one thread
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = folder / "store"
    store.unlink(missing_ok=True)
    job = (folder, options, ranks, precisions, device, steps)
    processes = [context.Process(target=_rank, args=(rank, *job)) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    if failed:
        logs = [(folder / f"log_{rank}").read_text().strip().splitlines()[-1:] for rank in failed]
        raise RowFailed("; ".join(f"rank {rank}: {log}" for rank, log in zip(failed, logs, strict=True)))
    found = [torch.load(folder / f"found_{rank}") for rank in range(ranks)]
    measured = {name: max(costs[name] for costs, _ in found) for name in found[0][0]}
    measured["tokens_per_s"] = measured["tokens"] / measured["seconds"]
    whole: Gradients = {precision: {} for precision in precisions}
    for _, taken in found:
        for precision, by_name in taken.items():
            whole[precision] |= by_name
    return measured, whole


def _rank(
    rank: int,
    folder: Path,
    options: Options,
    ranks: int,
    precisions: tuple[str, ...],
    device: str,
    steps: int,
) -> None:
    """Run one rank in its own process."""
    assert threads(os.getppid()) == 1
    os.dup2(os.open(folder / f"log_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    try:
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_device(rank)
        backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        found = costs(folder / "large", options, device, steps)
        taken = {p: gradients(folder / "small", options, p, device) for p in precisions}
        torch.save((found, taken), folder / f"found_{rank}")
        leave_distributed(together=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # do not wait at exit, because other ranks may wait for this rank
