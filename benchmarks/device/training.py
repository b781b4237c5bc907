"""Measure log-probs and updates of the training engine with different settings, at two lengths.

All sequences of a row have the same length and go through micro-batches of `BUDGET` tokens. The bound of a
row counts the operations of matrices and attention (one forward pass for log-probs, three times that for an
update), but not those of recomputation. The row also has the peak memory, the memory that Tandem predicts,
which decides what is recomputed, and Tandem's message about that choice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.rates import Rates, clock
from benchmarks.device.report import Row, Setting, Skipped, free_memory
from benchmarks.device.shapes import SIZES, forward_operations, model_folder, parameters, training_bytes
from tandem.config.actor import ActorConfig
from tandem.config.fsdp import FSDPConfig
from tandem.config.model import FusedKernelOptions, ModelConfig
from tandem.config.optim import OptimConfig
from tandem.engines.train.base import MicroBatching
from tandem.engines.train.fsdp import FSDPEngine
from tandem.protocol import DataProto, Ragged
from tandem.workers.losses import ActorLoss

BUDGET = 16384
SEQUENCES = {8192: 4, 14255: 2}
PROMPT = 128
GIB = 2**30


def _head(backend: str) -> dict[str, Any]:
    return {"use_fused_kernels": True, "fused_kernel_options": FusedKernelOptions(impl_backend=backend)}


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "ops": {"gradient_checkpointing_mode": "ops"},
    "no recomputation": {"enable_gradient_checkpointing": False},
    "full recomputation": {"gradient_checkpointing_mode": "full"},
    "PyTorch head": {"use_fused_kernels": False},
    "Triton head": _head("triton"),
    "transformers' layers": {"use_liger": False},
    "Liger's layers": {"use_liger": True},
    "Liger's head": _head("liger"),
    "compiled": {},
}
"""Model keys that differ from the defaults. "compiled" differs in `fsdp_config.use_torch_compile`."""


NEEDS = {"Liger's layers": ("liger_kernel",), "Liger's head": ("liger_kernel", "cutlass")}
"""Packages that a variant needs; without them it is skipped."""


class Bench:
    """The current engine, kept for the next row if the variant is the same."""

    def __init__(self, size: str) -> None:
        self.size = size
        self._variant = ""
        self._engine: FSDPEngine | None = None
        self.said: list[str] = []

    def engine(self, variant: str, setting: Setting) -> FSDPEngine:
        if self._engine is None or variant != self._variant:
            self.drop(setting)
            folder = model_folder(self.size, setting.folder, setting.device)
            self._engine = make_engine(variant, folder, setting, say=self.said.append)
            self._variant = variant
        return self._engine

    def drop(self, setting: Setting) -> None:
        self._engine = None
        self.said.clear()
        free_memory(setting.device)

    def run(
        self, setting: Setting, work: Callable[[FSDPEngine], dict[str, Any]], variant: str
    ) -> dict[str, Any]:
        """Return the result of the work; if it fails, drop the engine."""
        missing = [package for package in NEEDS.get(variant, ()) if find_spec(package) is None]
        if missing:
            raise Skipped(f"these packages are not installed: {', '.join(missing)}")
        engine = self.engine(variant, setting)
        try:
            return work(engine)
        except BaseException:
            del engine
            self.drop(setting)
            raise


def make_engine(
    variant: str, folder: Path, setting: Setting, say: Callable[[str], None] | None = None
) -> FSDPEngine:
    return FSDPEngine(
        folder,
        model=ModelConfig(path=str(folder), tokenizer_path=str(folder), **VARIANTS[variant]),
        fsdp=FSDPConfig(dtype="bf16", use_torch_compile=variant == "compiled", optimizer_offload=True),
        optim=OptimConfig(lr=1e-6),
        total_steps=1000,
        device=setting.device,
        say=say,
    )


def rows(setting: Setting) -> list[Row]:
    size, lengths = ("tiny", {64: 2}) if setting.tiny else ("1.5B", SEQUENCES)
    bench, short, both = Bench(size), list(lengths)[:1], list(lengths)
    plan: list[tuple[str, str, list[int], int]] = [
        ("log-probs", "default", both, BUDGET),
        ("update", "default", both, BUDGET),
        ("update", "ops", both, BUDGET),
        ("update", "no recomputation", both, BUDGET),
        ("update", "no recomputation", short, BUDGET // 2),
        ("update", "full recomputation", short, BUDGET),
        ("log-probs", "PyTorch head", short, BUDGET),
        ("update", "PyTorch head", short, BUDGET),
        ("log-probs", "Triton head", short, BUDGET),
        ("update", "Triton head", short, BUDGET),
        ("log-probs", "transformers' layers", short, BUDGET),
        ("update", "transformers' layers", short, BUDGET),
        ("log-probs", "Liger's layers", short, BUDGET),
        ("update", "Liger's layers", short, BUDGET),
        ("log-probs", "Liger's head", short, BUDGET),
        ("update", "Liger's head", short, BUDGET),
        ("log-probs", "compiled", short, BUDGET),
        ("update", "compiled", short, BUDGET),
    ]
    if setting.device.type != "cuda":
        plan = [part for part in plan if part[1] not in (*NEEDS, "Triton head", "compiled")]
    measured = [
        row(bench, phase, variant, length, lengths[length], budget)
        for phase, variant, chosen, budget in plan
        for length in chosen
    ]
    bound = partial(moved_s, size=size)
    offload = Row("optimizer state to the host and back", partial(move, bench), 25, "s", bound)
    first = 2 * len(both)  # the rows of the default engine
    return [*measured[:first], offload, *measured[first:]]


def row(bench: Bench, phase: str, variant: str, length: int, sequences: int, budget: int) -> Row:
    name = f"{phase}, {variant}, {length} tokens"
    name += "" if budget == BUDGET else f", micro-batches of {budget}"
    work = partial(run_phase, bench, phase, variant, length, sequences, budget)
    bound = partial(tokens_per_s, size=bench.size, length=length, passes=1 if phase == "log-probs" else 3)
    return Row(name, work, 60 if variant == "compiled" else 20, bound=bound)


def tokens_per_s(rates: Rates, size: str, length: int, passes: int) -> float:
    return rates.product / (passes * forward_operations(size, length))


def run_phase(
    bench: Bench, phase: str, variant: str, length: int, sequences: int, budget: int, setting: Setting
) -> dict[str, Any]:
    batch = make_batch(sequences, length, SIZES[bench.size]["vocab_size"], setting.tiny)
    micro = MicroBatching(max_tokens=budget)

    def measured(engine: FSDPEngine) -> dict[str, Any]:
        loss = ActorLoss.from_config(ActorConfig(), recomputed=False)

        def step() -> None:
            if phase == "update":
                engine.train_step(batch, loss, micro=micro).to_floats()
            else:
                engine.forward(batch, outputs=frozenset({"log_probs"}), micro=micro)

        return timed(step, setting) | {"tokens": sequences * length, "budget": budget}

    told = bench.run(setting, measured, variant)
    told |= {"value": told["tokens"] / told["step_s"], "said": list(bench.said)}
    if phase == "update":
        fused = variant != "transformers' layers"
        told["formula_gib"] = formula(bench.size, min(budget, sequences * length), length, fused=fused)
    return told


def formula(size: str, budget: int, length: int, *, fused: bool) -> dict[str, float]:
    """Return `training_bytes` for micro-batches of whole sequences, in GiB."""
    tokens = budget // length * length or length
    counts = training_bytes(size, tokens, fused=fused)
    return {name: round(count / GIB, 2) for name, count in counts.items()}


def timed(step: Callable[[], None], setting: Setting, repeats: int = 3) -> dict[str, Any]:
    """Return the best of some steps, the first step with kernel compilation, and the peak memory."""
    device = setting.device
    first = clock(step, device)
    free_memory(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    took = [clock(step, device) for _ in range(1 if setting.tiny else repeats)]
    told: dict[str, Any] = {"step_s": min(took), "all_s": took, "first_s": first}
    if device.type == "cuda":
        told["held_gib"] = held / GIB
        told["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        told["peak_reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
    return told


def make_batch(sequences: int, length: int, vocabulary: int, tiny: bool = False) -> DataProto:
    """Make random tokens and advantages; the first tokens of each sequence are its prompt."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (sequences * length,), generator=draw)
    tokens = Ragged.from_lengths(ids, torch.full((sequences,), length))
    mask = tokens.with_values(tokens.positions() >= (length // 8 if tiny else PROMPT))
    advantages = tokens.with_values(torch.randn(sequences, generator=draw).repeat_interleave(length))
    return DataProto({"tokens": tokens, "response_mask": mask, "advantages": advantages})


def moved_s(rates: Rates, size: str) -> float:
    """Return the seconds to copy AdamW's moments to the host and back, at the rates of pinned copies."""
    moments = 8 * parameters(size)
    return moments / rates.to_host + moments / rates.from_host


def move(bench: Bench, setting: Setting) -> dict[str, Any]:
    """Move the optimizer state to the host and back three times; the first time allocates buffers."""
    if setting.device.type != "cuda":
        raise Skipped("on a CPU there is nothing to move")

    def measured(engine: FSDPEngine) -> dict[str, Any]:
        there, back = [], []
        for _ in range(3):
            there.append(clock(engine.offload, setting.device))
            back.append(clock(lambda: engine.onload(optimizer=True), setting.device))
        return {"value": min(there[1:]) + min(back[1:]), "offload_s": there, "onload_s": back}

    return bench.run(setting, measured, "default")
