"""Measure the rollout engine end to end: 512 requests of different lengths, and weight updates.

The requests run before and after a weight update. The phase also measures the time of an update, of graph
captures, and of the host in a step. The bound of tokens per second is the time to read the keys and values of
each sequence at every token that it writes, and all matrices at every step of a full batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.device.rates import Rates, clock, synchronize
from benchmarks.device.report import Row, Setting
from benchmarks.device.shapes import SIZES, build, kv_bytes, matrices, model_folder
from benchmarks.device.training import make_engine
from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.graphs import CudaCapture
from tandem.protocol import Request, Sample, SamplingParams

SAMPLES_OF_A_PROMPT = 8
MEDIAN, SIGMA = 1024, 0.7  # the lognormal distribution of response lengths, before they are capped


@dataclass(frozen=True)
class Load:
    """A set of requests.

    Attributes:
        size: the model.
        requests: the number of requests.
        prompt, longest: tokens of the longest prompt and of the longest response.
        running: how many requests run at the same time.
    """

    size: str
    requests: int
    prompt: int
    longest: int
    running: int

    def make(self, seed: int = 0) -> list[Request]:
        """Make prompts of an eighth to all of the longest length, with eight responses each.

        Each response has its own length.
        """
        rng = np.random.default_rng(seed)
        median = min(MEDIAN, self.longest / 4)
        lengths = np.minimum(rng.lognormal(np.log(median), SIGMA, self.requests), self.longest)
        prompts = [
            rng.integers(0, SIZES[self.size]["vocab_size"], rng.integers(self.prompt // 8, self.prompt + 1))
            for _ in range(self.requests // SAMPLES_OF_A_PROMPT)
        ]
        return [
            Request(
                f"{seed}-{index // SAMPLES_OF_A_PROMPT}",
                index % SAMPLES_OF_A_PROMPT,
                prompts[index // SAMPLES_OF_A_PROMPT],
                SamplingParams(max_tokens=max(1, int(length)), temperature=1.0),
            )
            for index, length in enumerate(lengths)
        ]

    def tokens_per_s(self, rates: Rates) -> float:
        """Return the bound: keys and values are read at each token, matrices at each step.

        Products are ignored because they are far from their bound at these sizes.
        """
        requests = self.make()
        written = np.array([request.params.max_tokens for request in requests])
        prompts = np.array([len(request.prompt_ids) for request in requests])
        seen = float((written * (prompts + written / 2)).sum()) * kv_bytes(self.size)
        steps = max(written.max(), written.sum() / self.running)
        return float(written.sum() / ((seen + steps * 2 * matrices(self.size)) / rates.copy))


@dataclass
class Captures:
    """The number of graphs captured, and the seconds that this took."""

    count: int = 0
    seconds: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the captures inside the context."""
        capture = CudaCapture.__call__

        def timed(own: CudaCapture, *given: Any) -> Any:
            began = time.perf_counter()
            try:
                return capture(own, *given)
            finally:
                self.count += 1
                self.seconds += time.perf_counter() - began

        with mock.patch.object(CudaCapture, "__call__", timed):
            yield


@dataclass
class Bench:
    """One engine over one model, which all rows use."""

    load: Load
    _engine: NativeEngine | None = None
    _module: Any = None
    _version: int = field(default=0)

    def engine(self, setting: Setting) -> NativeEngine:
        if self._engine is None:
            self._module = build(self.load.size, torch.bfloat16, setting.device)
            engine = NativeEngine(
                device=setting.device,
                max_length=self.load.prompt + self.load.longest,
                max_num_seqs=self.load.running,
                gpu_memory_utilization=0.8 if setting.device.type == "cuda" else 0.05,
            )
            engine.update_weights(SharedModule(self._module), 0)
            self._engine = engine
        return self._engine

    def update(self, setting: Setting) -> float:
        engine = self.engine(setting)
        self._version += 1
        return clock(lambda: engine.update_weights(SharedModule(self._module), self._version), setting.device)

    def drop(self) -> None:
        self._engine = self._module = None


def rows(setting: Setting) -> list[Row]:
    load = Load("tiny", 16, 16, 24, 8) if setting.tiny else Load("1.5B", 512, 1024, 4096, 256)
    bench = Bench(load)
    found = [
        Row("first generation, kernels and graphs made", partial(serve, bench, seed=1), 60),
        Row("update of the weights in place", partial(update, bench), 5, "s"),
        Row("generation after it", partial(serve, bench), 60, bound=load.tokens_per_s),
        Row("device busy in steady decoding", partial(busy, bench), 20, "of the time"),
        Row("a step of a two-layer model, the host's part", host_step, 20, "ms"),
        Row("update through the trainer, and a generation", partial(through_trainer, bench), 60, "s"),
    ]
    return found if setting.device.type == "cuda" else [*found[:3], found[4]]


def serve(bench: Bench, setting: Setting, seed: int = 0) -> dict[str, Any]:
    """Measure the time for all requests of a load."""
    engine, requests = bench.engine(setting), bench.load.make(seed)
    engine.stats()
    captures = Captures()
    with captures.counted():
        samples: list[Sample] = []
        took = clock(lambda: samples.extend(generate(engine, requests)), setting.device)
    written = sum(len(sample.token_ids) for sample in samples)
    assert written == sum(request.params.max_tokens for request in requests)
    finite = all(np.isfinite(sample.log_probs).all() for sample in samples)
    counters = engine.stats()
    steps = counters["decode_steps"]
    return {
        "value": written / took,
        "seconds": took,
        "tokens": written,
        "steps": steps,
        "ms_per_step": 1e3 * took / max(steps, 1),
        "captures": captures.count,
        "capture_s": captures.seconds,
        "finite_log_probs": bool(finite),
        "counters": counters,
    }


def update(bench: Bench, setting: Setting) -> dict[str, Any]:
    took = [bench.update(setting) for _ in range(3)]
    return {"value": min(took), "all_s": took}


def running(engine: NativeEngine, requests: Sequence[Request], steps: int) -> None:
    """Start the requests, and take steps until the prompts are read and the graphs are captured."""
    engine.submit(requests)
    for _ in range(steps):
        engine.poll(0.0)


def busy(bench: Bench, setting: Setting) -> dict[str, Any]:
    """Return the share of time in which the device works, in steps of a full batch, by PyTorch's profiler."""
    engine, load = bench.engine(setting), bench.load
    params = SamplingParams(max_tokens=min(400, load.longest), temperature=1.0)
    prompt = load.make()[0].prompt_ids
    requests = [Request("busy", index, prompt, params) for index in range(load.running)]
    running(engine, requests, 40)
    synchronize(setting.device)
    wall = clock(lambda: [engine.poll(0.0) for _ in range(50)], setting.device) / 50
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            engine.poll(0.0)
        synchronize(setting.device)
    engine.abort([request.id for request in requests])
    device_s = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / 20
    return {"value": device_s / wall, "step_ms": 1e3 * wall, "device_ms": 1e3 * device_s}


def host_step(setting: Setting) -> dict[str, Any]:
    """Measure the milliseconds of a step of a tiny model in a full batch.

    The device has almost nothing to do, so this is the host's time: planning, the launch of one graph, and
    reading the tokens.
    """
    count, steps = (4, 10) if setting.tiny else (256, 200)
    engine = NativeEngine(device=setting.device, max_length=1024, max_num_seqs=count)
    engine.update_weights(SharedModule(build("tiny", torch.bfloat16, setting.device)), 0)
    prompt = np.arange(16)
    params = SamplingParams(max_tokens=900, temperature=1.0)
    requests = [Request("host", index, prompt, params) for index in range(count)]
    running(engine, requests, 20)
    took = clock(lambda: [engine.poll(0.0) for _ in range(steps)], setting.device) / steps
    engine.abort([request.id for request in requests])
    return {"value": 1e3 * took, "rows": count}


def through_trainer(bench: Bench, setting: Setting) -> dict[str, Any]:
    """Update weights and generate a few steps several times, as a run on one device does.

    The trainer's module is unsharded for each update. The graphs of the first time can be used again if the
    weights are at the same addresses.
    """
    bench.drop()
    folder = model_folder(bench.load.size, setting.folder, setting.device)
    trainer = make_engine("default", folder, setting)
    engine = NativeEngine(device=setting.device, max_length=1024, max_num_seqs=64, gpu_memory_utilization=0.8)
    params = SamplingParams(max_tokens=64, temperature=1.0)
    told: dict[str, Any] = {"update_s": [], "generation_s": [], "captures": [], "capture_s": []}
    for version in range(3):
        captures = Captures()
        requests = [Request(f"{version}", index, np.arange(16), params) for index in range(64)]

        def update_and_write(version: int = version, requests: Sequence[Request] = requests) -> None:
            with trainer.unsharded() as module:
                source = SharedModule(module)
                told["update_s"].append(clock(lambda: engine.update_weights(source, version), setting.device))
                told["generation_s"].append(clock(lambda: generate(engine, requests), setting.device))
            engine.sleep()

        with captures.counted():
            clock(update_and_write, setting.device)
        told["captures"].append(captures.count)
        told["capture_s"].append(captures.seconds)
    return {"value": told["update_s"][-1] + told["generation_s"][-1], **told}
