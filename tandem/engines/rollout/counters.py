"""An engine's counters and its occasional log line."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOG_EVERY_S = 2.0
_NAMES = (
    "generated_tokens",
    "prefill_tokens",
    "cached_prefix_tokens",
    "decode_steps",
    "peak_running",
    "cache_bytes",
    "cache_use",
    "preemptions",
)


class Counters:
    """Sums since the last `take`, and a line to `log` about every two seconds of work.

    Attributes:
        written: tokens generated since the engine was made.
    """

    def __init__(self, log: Callable[[str], None] | None) -> None:
        self._log = log
        self.written = 0
        self._logged_at = time.monotonic()
        self._logged_tokens = 0
        self._reset()

    def _reset(self) -> None:
        self.generated_tokens = 0
        self.prefill_tokens = 0
        self.decode_steps = 0
        self.peak_running = 0
        self.cached_prefix_tokens = 0
        self.cache_bytes = 0
        self.cache_use = 0.0
        self.preemptions = 0

    def take(self) -> dict[str, float]:
        """The counters by the protocol's names; all zero afterwards."""
        out = {name: float(getattr(self, name)) for name in _NAMES}
        self._logged_tokens -= self.generated_tokens
        self._reset()
        return out

    def wrote(self, tokens: int) -> None:
        self.generated_tokens += tokens
        self.written += tokens

    def running(self, rows: int) -> None:
        self.peak_running = max(self.peak_running, rows)

    def cache(self, size: int, use: float) -> None:
        """Bytes of the cache that the pending requests can fill, and the share of it that sequences hold."""
        self.cache_bytes, self.cache_use = max(self.cache_bytes, size), max(self.cache_use, use)

    def line(self, running: int, waiting: int, cache_use: float) -> None:
        """Logs the state of affairs if two seconds have passed since the last line."""
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
