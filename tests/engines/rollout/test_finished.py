"""Tests of `finished`: an engine that stalls raises an error."""

import pytest

from tandem.engines.rollout import base
from tandem.errors import EngineError


class Stuck:
    """An engine that finishes one request at each of the first polls and then none. A poll takes a second."""

    def __init__(self, works):
        self.works, self.clock, self.waiting, self.written = works, 0.0, [], 0

    def submit(self, requests):
        self.waiting += requests

    def poll(self, timeout_s):
        self.clock += 1
        if self.written >= self.works:
            return []
        self.written += 1
        return [self.waiting.pop(0)]

    def progress(self):
        return self.written

    def abort(self, ids):
        self.waiting = [request for request in self.waiting if request.id not in ids]


def test_an_engine_that_stands_still_is_given_up(make_requests, monkeypatch):
    engine = Stuck(2)
    monkeypatch.setattr(base.time, "monotonic", lambda: engine.clock)
    parts = base.finished(engine, make_requests(4), at_least=1, stall_timeout_s=10)
    assert [len(next(parts)) for _ in range(2)] == [1, 1]
    engine.clock += 100  # time that the caller takes
    with pytest.raises(EngineError, match="no token for 10 s") as caught:
        next(parts)
    assert engine.clock == 2 + 100 + 11
    assert "2 requests pending, the first is ('p2', 0)" in caught.value.got
    assert engine.waiting == []
