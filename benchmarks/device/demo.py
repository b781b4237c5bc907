"""Measure `tandem demo` as a user runs it, and the slowest kernels of decoding and training."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from benchmarks.device.commands import tandem
from benchmarks.device.generation import running
from benchmarks.device.rates import clock, synchronize
from benchmarks.device.report import Row, Setting
from benchmarks.device.shapes import SIZES, build, model_folder
from benchmarks.device.training import BUDGET, make_batch, make_engine
from tandem.config.actor import ActorConfig
from tandem.engines.rollout.base import SharedModule
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.train.base import MicroBatching
from tandem.protocol import Request, SamplingParams
from tandem.workers.losses import ActorLoss

DEMO_LIMIT_S = 300.0
KERNELS = 15
SMALL = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
    "trainer.save_freq=-1",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)


def rows(setting: Setting) -> list[Row]:
    size = "tiny" if setting.tiny else "1.5B"
    return [
        Row("tandem demo", run_demo, 20 if setting.tiny else 60, "s"),
        Row("kernels of an update", partial(train_kernels, size=size, update=True), 30, "of the time"),
        Row("kernels of log-probs", partial(train_kernels, size=size, update=False), 25, "of the time"),
        Row("kernels of decoding", partial(decode_kernels, size=size), 25, "of the time"),
    ]


def run_demo(setting: Setting) -> dict[str, Any]:
    """Run the demo; return its own measurement of the seconds, and the accuracies before and after."""
    words = ["demo", "--out", str(setting.folder / "demo"), f"trainer.device={setting.device.type}"]
    words += SMALL if setting.tiny else ()
    said = tandem(setting, *words, limit_s=DEMO_LIMIT_S)
    found = re.search(r"([\d.]+) before, ([\d.]+) after, in (\d+) s", said)
    if found is None:
        raise RuntimeError(f"the demo printed no accuracy:\n{said[-2000:]}")
    before, after, seconds = map(float, found.groups())
    return {"value": seconds, "accuracy_before": before, "accuracy_after": after}


def train_kernels(setting: Setting, size: str, update: bool) -> dict[str, Any]:
    """Profile one micro-batch with two sequences of 8k tokens."""
    engine = make_engine("default", model_folder(size, setting.folder, setting.device), setting)
    length = 64 if setting.tiny else 8192
    batch = make_batch(2, length, SIZES[size]["vocab_size"], setting.tiny)
    loss = ActorLoss.from_config(ActorConfig(), recomputed=False)
    micro = MicroBatching(max_tokens=BUDGET)

    def step() -> None:
        if update:
            engine.train_step(batch, loss, micro=micro).to_floats()
        else:
            engine.forward(batch, outputs=frozenset({"log_probs"}), micro=micro)

    return kernels(step, setting, repeats=1)


def decode_kernels(setting: Setting, size: str) -> dict[str, Any]:
    """Profile decode steps of 256 sequences of about 1,100 tokens."""
    count, prompt, steps = (4, 16, 2) if setting.tiny else (256, 1024, 10)
    engine = NativeEngine(
        device=setting.device,
        max_length=2 * prompt,
        max_num_seqs=count,
        gpu_memory_utilization=0.8 if setting.device.type == "cuda" else 0.05,
    )
    engine.update_weights(SharedModule(build(size, torch.bfloat16, setting.device)), 0)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=prompt, temperature=1.0)
    requests = [
        Request(str(index), 0, rng.integers(0, SIZES[size]["vocab_size"], prompt), params)
        for index in range(count)
    ]
    running(engine, requests, 2 if setting.tiny else 80)  # 33 of these steps read prompts
    told = kernels(lambda: [engine.poll(0.0) for _ in range(steps)], setting, repeats=steps)
    engine.abort([request.id for request in requests])
    return told


def kernels(work: Callable[[], object], setting: Setting, repeats: int) -> dict[str, Any]:
    """Return the share of time in which the device is busy, and the kernels that take most of it.

    Times are in milliseconds per repeat. On a CPU, operators replace kernels.
    """
    device, cuda = setting.device, setting.device.type == "cuda"
    work()
    wall = clock(work, device)
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        work()
        synchronize(device)
    events = [
        (event.self_device_time_total if cuda else event.self_cpu_time_total, event.count, event.key)
        for event in profile.key_averages()
    ]
    most = sorted(events, reverse=True)[:KERNELS]
    total = sum(taken for taken, _, _ in events)
    return {
        "value": total / 1e6 / wall,
        "wall_ms": 1e3 * wall / repeats,
        "device_ms": total / 1e3 / repeats,
        "kernels": [
            {
                "ms": taken / 1e3 / repeats,
                "share": taken / total,
                "calls": count / repeats,
                "name": name[:160],
            }
            for taken, count, name in most
        ],
    }
