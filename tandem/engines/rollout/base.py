"""The protocol of rollout engines, and `generate`, which drains one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from tandem.errors import EngineError
from tandem.protocol import Request, Sample


@dataclass(frozen=True, slots=True)
class SharedModule:
    """Weights that need no transfer: the trainer's own module, unsharded in place.

    Attributes:
        module: a transformers causal LM in compute dtype; valid while the trainer holds it unsharded.
    """

    module: nn.Module


WeightSource = SharedModule


@runtime_checkable
class RolloutEngine(Protocol):
    """Writes responses. In-process engines do their work inside `poll`."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; returns at once.

        Raises:
            EngineError: a request that can never run (prompt and max_tokens beyond the cache or the
                model's positions, a duplicate id); nothing of the call is queued then.
        """
        ...

    def poll(self, timeout_s: float) -> list[Sample]:
        """Works for at most about `timeout_s`; the samples finished since the last poll."""
        ...

    def pending(self) -> int:
        """Requests submitted and not yet returned."""
        ...

    def abort(self, ids: Sequence[tuple[str, int]], *, keep_partial: bool = False) -> list[Sample]:
        """Drops requests; their partial samples with finish_reason "abort" if asked for."""
        ...

    def update_weights(self, source: WeightSource, version: int) -> None:
        """The weights to sample from until the next call; drops any cached prefix."""
        ...

    def sleep(self) -> None:
        """Gives the KV cache back.

        Raises:
            EngineError: requests are pending.
        """
        ...

    def progress(self) -> int:
        """Tokens written since the engine was made; who waits for one that stands still waits in vain."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the last call: generated_tokens, prefill_tokens, decode_steps,
        peak_running, cache_bytes, preemptions; all zero afterwards."""
        ...


def generate(
    engine: RolloutEngine, requests: Sequence[Request], *, stall_timeout_s: float = 600.0
) -> list[Sample]:
    """Runs all requests to their end; samples in the order of the requests.

    Raises:
        EngineError: no token was written for `stall_timeout_s` while requests were pending.
    """
    engine.submit(requests)
    done: dict[tuple[str, int], Sample] = {}
    written, last = engine.progress(), time.monotonic()
    while len(done) < len(requests):
        done.update((sample.id, sample) for sample in engine.poll(timeout_s=1.0))
        now = time.monotonic()
        if engine.progress() != written:
            written, last = engine.progress(), now
        elif now - last > stall_timeout_s:
            missing = [request.id for request in requests if request.id not in done]
            engine.abort(missing)
            raise EngineError(
                f"the engine wrote no token for {stall_timeout_s:.0f} s",
                got=f"{len(missing)} requests pending, the first is {missing[0]}",
                remedy="look at the engine's log and at what else uses its device",
            )
    return [done[request.id] for request in requests]
