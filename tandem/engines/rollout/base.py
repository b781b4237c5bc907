"""The protocol of rollout engines; `finished` and `generate`, which drain one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from tandem.engines.weight_sync import Digest
from tandem.errors import EngineError
from tandem.protocol import Request, Sample

SleepTag = Literal["weights", "kv_cache"]
SLEEP_TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache")


@dataclass(frozen=True, slots=True)
class SharedModule:
    """Weights that need no transfer: the trainer's own module, unsharded in place.

    Attributes:
        module: a transformers causal LM in compute dtype; valid while the trainer holds it unsharded.
        release: gives the weights' memory back; an engine that has copied them may call it once. The module's
            config stays.
    """

    module: nn.Module
    release: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class WeightStream:
    """Weights that arrive one after the other.

    Attributes:
        tensors: whole tensors by Hugging Face name, in compute dtype, on any device; read once, and each
            only valid until the next is asked for.
    """

    tensors: Iterator[tuple[str, Tensor]]


WeightSource = SharedModule | WeightStream


@runtime_checkable
class RolloutEngine(Protocol):
    """Writes responses. In-process engines do their work inside `poll`."""

    @property
    def takes(self) -> frozenset[type[SharedModule] | type[WeightStream]]:
        """The kinds of `WeightSource` it accepts; none for an engine whose weights cannot be changed."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; returns at once.

        Raises:
            EngineError: a request that can never run (prompt and max_tokens beyond the cache or the
                model's positions, a duplicate id); nothing of the call is queued then.
        """

    def poll(self, timeout_s: float) -> list[Sample]:
        """Works for at most about `timeout_s`; the samples finished since the last poll."""

    def pending(self) -> int:
        """Requests submitted and not yet returned."""

    def abort(self, ids: Sequence[tuple[str, int]], *, keep_partial: bool = False) -> list[Sample]:
        """Drops requests; their partial samples with finish_reason "abort" if asked for. One that is
        finished, but not polled yet, keeps its own reason."""

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        """The weights to sample from until the next call; drops any cached prefix.

        Returns:
            the digest of the weights as the engine holds them now.

        Raises:
            EngineError: weights of another model, or of a kind that it does not take.
        """

    def sleep(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        """Gives memory back: the KV cache, the weights. An engine that sleeps is woken by `wake`, or by
        `update_weights` and the next `poll`.

        Raises:
            EngineError: requests are pending.
        """

    def wake(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        """Takes the memory again. Weights that were dropped come back with the next `update_weights`."""

    def close(self) -> None:
        """Ends what the engine started: processes, connections; idempotent."""

    def progress(self) -> int:
        """Tokens written since the engine was made; who waits for one that stands still waits in vain."""

    def stats(self) -> dict[str, float]:
        """Counters since the last call, all zero afterwards: generated_tokens; prefill_tokens, prompt tokens
        computed; cached_prefix_tokens, those found in the cache instead; decode_steps; peak_running,
        sequences; cache_bytes, of the cache that these requests could fill, which may have grown larger for
        earlier ones; cache_use, the largest share of it in use; preemptions, sequences whose part of the
        cache was taken away, to be computed again."""


def finished(
    engine: RolloutEngine, requests: Sequence[Request], *, at_least: int = 1, stall_timeout_s: float = 600.0
) -> Generator[list[Sample], None, None]:
    """Runs all requests to their end and gives the samples as they finish. Left early, by its reader or
    by an error, it drops the requests that are still pending.

    Args:
        at_least: samples given at a time, but for the last time.

    Raises:
        EngineError: no token was written for `stall_timeout_s` while requests were pending; time in
            which nobody asks for samples does not count.
    """
    engine.submit(requests)
    left = {request.id for request in requests}
    ready: list[Sample] = []
    try:
        while left:
            written, last = engine.progress(), time.monotonic()
            while len(ready) < min(at_least, len(ready) + len(left)):
                done = engine.poll(timeout_s=1.0)
                left -= {sample.id for sample in done}
                ready += done
                if engine.progress() != written:
                    written, last = engine.progress(), time.monotonic()
                elif time.monotonic() - last > stall_timeout_s:
                    raise EngineError(
                        f"the engine wrote no token for {stall_timeout_s:.0f} s",
                        got=f"{len(left)} requests pending, the first is {min(left)}",
                        remedy="look at the engine's log and at what else uses its device",
                    )
            given, ready = ready, []
            yield given
    finally:
        engine.abort(sorted(left))


def generate(
    engine: RolloutEngine, requests: Sequence[Request], *, stall_timeout_s: float = 600.0
) -> list[Sample]:
    """Runs all requests to their end; samples in the order of the requests.

    Raises:
        EngineError: see `finished`.
    """
    parts = finished(engine, requests, stall_timeout_s=stall_timeout_s)
    done = {sample.id: sample for part in parts for sample in part}
    return [done[request.id] for request in requests]
