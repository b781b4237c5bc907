"""Measure which bytes of a batch reach the controller, and the memory of a long run.

The benchmark runs a chain of calls as in training, on two pools of 2 processes on Ray. One group makes
samples of about 2,048 tokens. The other group computes log-probs from them. The controller joins the columns,
forms balanced mini-batches and passes them to the first group, which reads them. The controller itself only
holds futures.

traffic  One step with 64, 512 and 4,096 samples. Three counts: the bytes of indices and values that reach the
         controller, as the backend counts them; all bytes that the controller's thread gets from Ray,
         measured independently; the bytes that the controller sends. The benchmark fails if values reach the
         controller, or more than 64 bytes per sample plus 8 bytes for each of its lengths.
memory   200 steps with 512 samples: the private memory of the controller and of the workers, and the use of
the
         object store. The benchmark fails if one of them grows after the warm-up.

    python benchmarks/controller_traffic.py [--steps N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private.worker import global_worker
from tiny import arguments

from tandem.protocol import DataProto, Ragged
from tandem.runtime import BatchFuture, Dispatch, Future, ResourcePool, Worker, WorkerGroup, register
from tandem.runtime.dispatch import Call
from tandem.runtime.ray_backend import RayBackend

LENGTH, N, MINI_BATCHES = 2048, 8, 4
# bytes per sample; bytes per sample for each group of columns with equal lengths
INDEX_BOUND, LENGTHS_BOUND = 64, 8
GROWTH_BOUND = {"controller": 8 * 1024, "workers": 64 * 1024, "store": 64 * 1024}  # bytes per step


class SampleWorker(Worker):
    """A worker that makes samples, computes a column from them, and reads mini-batches."""

    def __init__(self) -> None:
        self.read = (0, 0)

    @register(blocking=False)
    def generate(self, samples: int, step: int) -> DataProto:
        """Return this worker's share of the samples, N per prompt."""
        rows = torch.arange(samples).tensor_split(self.world_size)[self.rank]
        torch.manual_seed(step * self.world_size + self.rank)
        lengths = torch.randint(LENGTH // 2, LENGTH * 3 // 2, (len(rows),))
        tokens = Ragged.from_lengths(torch.randint(1, 150_000, (int(lengths.sum()),)), lengths)
        mask = tokens.with_values(tokens.positions() > LENGTH // 4)
        log_probs = tokens.with_values(-torch.rand(len(tokens.values)))
        return DataProto(
            {"tokens": tokens, "response_mask": mask, "rollout_log_probs": log_probs},
            {"uid": [f"{step}-{row // N}" for row in rows.tolist()]},
        )

    @register(blocking=False, balance="tokens")
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        tokens = batch.ragged("tokens")
        return DataProto({"old_log_probs": tokens.with_values(-tokens.values.float())})

    @register(blocking=False, balance="tokens", collect="first")
    def update(self, batch: DataProto) -> None:
        tokens, computed = batch.ragged("tokens").values, batch.ragged("old_log_probs").values
        rows, matching = self.read
        self.read = rows + len(batch), matching + int((computed == -tokens.float()).sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_read(self) -> tuple[int, int]:
        """Return the rows read since the last call, and the number of tokens with the expected log-prob."""
        taken, self.read = self.read, (0, 0)
        return taken

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def private_memory(self) -> int:
        return private_memory()


class Sent:
    """Workers that count the bytes of their calls, as Ray serialises them."""

    bytes = 0

    def __init__(self, workers: Any) -> None:
        self._workers = workers
        self.world_size: int = workers.world_size

    def call(self, method: str, calls: Sequence[Call | None], *, keeps: bool) -> Any:
        context = global_worker.get_serialization_context()
        Sent.bytes += sum(context.serialize(call).total_bytes for call in calls if call is not None)
        return self._workers.call(method, calls, keeps=keeps)


class WeighingBackend(RayBackend):
    """A Ray backend that counts the bytes that the controller sends."""

    def launch(self, *placed: Any) -> Any:
        return Sent(super().launch(*placed))


@contextmanager
def weighed_gets() -> Iterator[list[int]]:
    """Record the sizes of everything that this thread gets from Ray inside the context."""
    sizes: list[int] = []
    get, thread = ray.get, threading.get_ident()

    def weighing(refs: Any, **options: Any) -> Any:
        value = get(refs, **options)
        if threading.get_ident() == thread:
            sizes.append(len(pickle.dumps(value, protocol=5)))
        return value

    ray.get = weighing
    try:
        yield sizes
    finally:
        ray.get = get


def groups(backend: RayBackend) -> tuple[WorkerGroup, WorkerGroup]:
    pools = [ResourcePool([2], name) for name in ("actor_pool", "reference_pool")]
    backend.reserve(pools)
    actor, reference = (
        WorkerGroup(backend, SampleWorker, pool, role=pool.name, balance=True) for pool in pools
    )
    return actor, reference


def run_step(actor: WorkerGroup, reference: WorkerGroup, samples: int, step: int) -> tuple[int, int]:
    """Run one step of the chain.

    Returns:
        The number of tokens in the batch, and the number of different length columns in the two indices.
    """
    made: BatchFuture = actor.generate(samples, step)
    computed: BatchFuture = reference.compute_log_prob(made)
    batch = made.union(computed)
    updates: list[Future[None]] = [actor.update(mini) for mini in batch.chunk(MINI_BATCHES, balance="tokens")]
    for update in updates:
        update.get()
    assert len(batch) == samples
    families = sum(len({id(lengths) for lengths in part.index.lengths.values()}) for part in (made, computed))
    return int(batch.index.lengths["tokens"].sum()), families


def measure_traffic(
    samples: int, actor: WorkerGroup, reference: WorkerGroup, backend: RayBackend
) -> dict[str, Any]:
    run_step(actor, reference, samples, step=1)
    actor.take_read()
    backend.take_traffic()
    Sent.bytes = 0
    with weighed_gets() as sizes:
        tokens, families = run_step(actor, reference, samples, step=2)
    sent, came = Sent.bytes, backend.take_traffic()
    rows, matching = map(sum, zip(*actor.take_read(), strict=True))
    assert (rows, matching) == (samples, tokens), "a mini-batch lost or mixed up samples"
    row = {
        "samples": samples,
        "batch_bytes": tokens * 17,  # int64 tokens, bool mask, two float32
        "value_bytes": came["controller/value_bytes"],
        "index_bytes_per_sample": came["controller/index_bytes"] / samples,
        "all_bytes_got_per_sample": sum(sizes) / samples,
        "bytes_sent_per_sample": sent / samples,
        "bound": INDEX_BOUND + LENGTHS_BOUND * families,
    }
    print(
        "{samples:>8} {batch_bytes:>12,} {value_bytes:>12,.0f} {index_bytes_per_sample:>16.1f}"
        " {all_bytes_got_per_sample:>16.1f} {bytes_sent_per_sample:>16.1f}".format(**row),
        flush=True,
    )
    return row


def private_memory() -> int:
    """Return the anonymous memory of this process in bytes, without its mappings of the object store."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def measure_memory(steps: int, samples: int, actor: WorkerGroup, reference: WorkerGroup) -> dict[str, Any]:
    capacity = ray.cluster_resources()["object_store_memory"]
    seen: dict[str, list[float]] = {"controller": [], "workers": [], "store": []}
    began = time.perf_counter()
    for step in range(steps):
        run_step(actor, reference, samples, step)
        seen["controller"].append(private_memory())
        seen["workers"].append(max(*actor.private_memory(), *reference.private_memory()))
        seen["store"].append(capacity - ray.available_resources()["object_store_memory"])
    took = time.perf_counter() - began
    slopes = {what: growth(values) for what, values in seen.items()}
    for what, values in seen.items():
        early, late = values[steps // 3] / 2**20, values[-1] / 2**20
        print(f"{what:>12} {early:>12.1f} {late:>12.1f} {slopes[what]:>16,.0f}")
    return {
        "steps": steps,
        "samples": samples,
        "seconds_per_step": took / steps,
        "growth_bytes_per_step": slopes,
        "bytes_at_each_tenth": {what: values[:: max(1, steps // 10)] for what, values in seen.items()},
    }


def growth(values: Sequence[float]) -> float:
    """Return the growth in bytes per step after the warm-up.

    The warm-up is the first third of the values. The growth is the difference of the medians of the other two
    thirds.
    """
    third = len(values) // 3
    return (statistics.median(values[-third:]) - statistics.median(values[-2 * third : -third])) / third


def complaints(traffic: list[dict[str, Any]], growths: dict[str, float]) -> Iterator[str]:
    for row in traffic:
        for what in ("index_bytes_per_sample", "all_bytes_got_per_sample"):
            if row["value_bytes"] or row[what] > row["bound"]:
                yield f"too many bytes reached the controller: {row}"
    for what, slope in growths.items():
        if slope > GROWTH_BOUND[what]:
            yield f"{what}: grows by {slope:,.0f} bytes per step; at most {GROWTH_BOUND[what]:,} are allowed"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="steps of the memory test; the first third is the warm-up"
    )
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    args = arguments(parser, steps=6)
    counts, samples = ((64,), 64) if args.tiny else ((64, 512, 4096), 512)
    backend = WeighingBackend("traffic", device="cpu")
    try:
        actor, reference = groups(backend)
        print(
            f"{'samples':>8} {'batch bytes':>12} {'value bytes':>12} {'index B/sample':>16}"
            f" {'got B/sample':>16} {'sent B/sample':>16}"
        )
        traffic = [measure_traffic(count, actor, reference, backend) for count in counts]
        print(f"{'':>12} {'MiB at 1/3':>12} {'at the end':>12} {'bytes/step':>16}")
        memory = measure_memory(args.steps, samples, actor, reference)
    finally:
        backend.shutdown()
    growths = {} if args.tiny else memory["growth_bytes_per_step"]  # a few steps do not show growth
    failures = list(complaints(traffic, growths))
    if args.out:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "ray": ray.__version__,
            },
            "traffic": traffic,
            "memory": memory,
            "failures": failures,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
