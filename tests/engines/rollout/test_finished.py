"""Tests of `finished`: an engine that stalls raises an error."""

from __future__ import annotations

import pytest

from tandem.engines.rollout import base
from tandem.errors import EngineError


class Stuck:
    """An engine that finishes one request at each of the first polls and then none."""

    def __init__(self, works: int, clock: list[float]) -> None:
        self.works, self.clock = works, clock
        self.waiting: list = []
        self.written = 0

    def submit(self, requests: list) -> None:
        self.waiting += requests

    def poll(self, timeout_s: float) -> list:
        self.clock[0] += 1
        if self.written >= self.works:
            return []
        self.written += 1
        return [self.waiting.pop(0)]

    def progress(self) -> int:
        return self.written

    def abort(self, ids: list) -> None:
        self.waiting = [request for request in self.waiting if request.id not in ids]


def test_an_engine_that_stands_still_is_given_up(make_requests, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(base.time, "monotonic", lambda: clock[0])
    engine = Stuck(2, clock)
    parts = base.finished(engine, make_requests(4), at_least=1, stall_timeout_s=10)
    assert [len(next(parts)) for _ in range(2)] == [1, 1]
    clock[0] += 100  # time that the caller takes
    with pytest.raises(EngineError, match="no token for 10 s") as caught:
        next(parts)
    assert clock[0] == 2 + 100 + 11
    assert "2 requests pending, the first is ('p2', 0)" in caught.value.got
    assert engine.waiting == []
