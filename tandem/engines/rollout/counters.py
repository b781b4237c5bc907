"""The counters of a rollout engine and its periodic log line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

_LOG_EVERY_S = 2.0


@dataclass(slots=True)
class _Sums:
    """The counters that are summed, named as in `RolloutEngine.stats`."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_prefix_tokens: int = 0
    decode_steps: int = 0
    peak_running: int = 0
    cache_bytes: int = 0
    cache_use: float = 0.0
    preemptions: int = 0


class Counters(_Sums):
    """The counters since the last `take`, and a log line about every two seconds of work.

    Attributes:
        written: Tokens generated since the engine was created.
    """

    def __init__(self, log: Callable[[str], None] | None) -> None:
        super().__init__()
        self._log = log
        self.written = 0
        self._logged_at = time.monotonic()
        self._logged_tokens = 0

    def take(self) -> dict[str, float]:
        """Return the counters, named as in `RolloutEngine.stats`, and reset them to zero."""
        out = {part.name: float(getattr(self, part.name)) for part in fields(_Sums)}
        self._logged_tokens -= self.generated_tokens
        _Sums.__init__(self)
        return out

    def wrote(self, tokens: int) -> None:
        self.generated_tokens += tokens
        self.written += tokens

    def running(self, rows: int) -> None:
        self.peak_running = max(self.peak_running, rows)

    def cache(self, size: int, use: float) -> None:
        """Record the size of the KV cache and how much of it is in use.

        Args:
            size: Bytes of the cache that the pending requests can fill.
            use: The fraction of these bytes that sequences occupy.
        """
        self.cache_bytes, self.cache_use = max(self.cache_bytes, size), max(self.cache_use, use)

    def line(self, running: int, waiting: int, cache_use: float) -> None:
        """Log the current state if two seconds have passed since the last line."""
        elapsed = time.monotonic() - self._logged_at
        if self._log is None or elapsed < _LOG_EVERY_S:
            return
        rate = (self.generated_tokens - self._logged_tokens) / elapsed
        self._log(
            f"rollout: {running} running, {waiting} waiting, "
            f"cache {100 * cache_use:.0f}% used, {self.preemptions} preemptions, {rate:,.0f} tokens/s"
        )
        self._logged_at += elapsed
        self._logged_tokens = self.generated_tokens
