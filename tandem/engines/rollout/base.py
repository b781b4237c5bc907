"""The protocol of rollout engines, and functions that run requests until all samples are finished."""

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
    """A source of weights that needs no transfer: the trainer's module, unsharded in place.

    Attributes:
        module: A transformers causal LM in compute dtype. It is valid while the trainer holds it unsharded.
        release: A function that frees the memory of the weights. An engine that has copied the weights may
            call it once. The module's config stays.
    """

    module: nn.Module
    release: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class WeightStream:
    """A source of weights that delivers one tensor after the other.

    Attributes:
        tensors: Pairs of Hugging Face name and whole tensor, in compute dtype, on any device. You can iterate
            once. Each tensor is valid only until the next one is requested.
    """

    tensors: Iterator[tuple[str, Tensor]]


WeightSource = SharedModule | WeightStream


@runtime_checkable
class RolloutEngine(Protocol):
    """The protocol of an engine that generates responses.

    Engines in this process do all their work inside `poll`.
    """

    @property
    def takes(self) -> frozenset[type[SharedModule] | type[WeightStream]]:
        """Return the types of `WeightSource` that the engine accepts.

        The set is empty for an engine whose weights cannot be changed.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests and return at once.

        Raises:
            EngineError: A request can never run: prompt and max_tokens exceed the cache or the model's
                positions, or the request's id is already in use. Then no request of this call is queued.
        """

    def poll(self, timeout_s: float) -> list[Sample]:
        """Generate for at most about `timeout_s` seconds. Return the samples finished since the last poll."""

    def pending(self) -> int:
        """Return the number of requests that were submitted and not yet returned."""

    def abort(self, ids: Sequence[tuple[str, int]], *, keep_partial: bool = False) -> list[Sample]:
        """Drop requests and return their partial samples if `keep_partial` is set.

        The partial samples have finish_reason "abort". A request that has finished but was not polled yet
        keeps its real finish_reason.
        """

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        """Set the weights to sample from until the next call, and drop all cached prefixes.

        Returns:
            The digest of the weights that are now in the engine.

        Raises:
            EngineError: The weights belong to another model, or the engine does not accept this type of
                source.
        """

    def sleep(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        """Free memory: the KV cache, the weights, or both.

        The engine wakes up at `wake`, or at `update_weights` and the next `poll`.

        Raises:
            EngineError: Requests are pending.
        """

    def wake(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        """Allocate the freed memory again. Dropped weights are loaded again by the next `update_weights`."""

    def close(self) -> None:
        """Stop the processes and connections that the engine started. Further calls do nothing."""

    def progress(self) -> int:
        """Return the number of tokens generated since the engine was created.

        If this number stops growing, the engine has stalled.
        """

    def stats(self) -> dict[str, float]:
        """Return the counters of the work since the last call and reset the counters to zero.

        - generated_tokens.
        - prefill_tokens: prompt tokens that were computed.
        - cached_prefix_tokens: prompt tokens whose keys and values were already in the cache.
        - decode_steps.
        - peak_running: the maximum number of sequences that ran at the same time.
        - cache_bytes: bytes of the cache that these requests could fill. The cache may have grown larger for
          earlier requests.
        - cache_use: the largest fraction of cache_bytes that was in use.
        - preemptions: sequences that lost their cache entries and must be computed again.
        """


def finished(
    engine: RolloutEngine, requests: Sequence[Request], *, at_least: int = 1, stall_timeout_s: float = 600.0
) -> Generator[list[Sample], None, None]:
    """Run all requests and yield the samples as they finish.

    If the caller stops early, or an error is raised, the requests that are still pending are dropped.

    Args:
        engine: The engine that runs the requests.
        requests: The requests.
        at_least: The minimum number of samples per yielded list. The last list may be shorter.
        stall_timeout_s: Seconds without a new token after which the engine counts as stalled.

    Yields:
        Lists of the samples that have finished since the last yield.

    Raises:
        EngineError: The engine generated no token for `stall_timeout_s` seconds while requests were pending.
            The time in which the caller does not ask for samples does not count.
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
                        f"the engine generated no token for {stall_timeout_s:.0f} s",
                        got=f"{len(left)} requests pending, the first is {min(left)}",
                        remedy="check the engine's log, and whether other programs use its device",
                    )
            given, ready = ready, []
            yield given
    finally:
        engine.abort(sorted(left))


def generate(
    engine: RolloutEngine, requests: Sequence[Request], *, stall_timeout_s: float = 600.0
) -> list[Sample]:
    """Run all requests and return their samples in the order of the requests.

    Raises:
        EngineError: See `finished`.
    """
    parts = finished(engine, requests, stall_timeout_s=stall_timeout_s)
    done = {sample.id: sample for part in parts for sample in part}
    return [done[request.id] for request in requests]
