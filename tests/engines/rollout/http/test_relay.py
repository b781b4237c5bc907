"""Tests of one weight stream that several engines read at once."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tandem.engines.rollout.base import WeightStream
from tandem.engines.rollout.http.relay import relay
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError

TENSORS = {f"t{i}": torch.full((4,), float(i)) for i in range(6)}


def reused():
    """Yield tensors. Each is overwritten when the next one is requested."""
    room = torch.empty(4)
    for name, tensor in TENSORS.items():
        yield name, room.copy_(tensor)


def reads(source):
    return digest((name, tensor.clone()) for name, tensor in source.tensors)


def fails(source):
    next(source.tensors)
    raise EngineError("no room")


def stops_early(source):
    return digest([next(source.tensors)])


def test_all_see_every_tensor_while_it_is_valid():
    assert relay(WeightStream(reused()), [reads] * 3) == [digest(TENSORS.items())] * 3


def test_a_reader_that_fails_or_stops_does_not_disturb_the_others():
    whole = digest(TENSORS.items())
    first, failed, part, last = relay(WeightStream(reused()), [reads, fails, stops_early, reads])
    assert first == last == whole
    assert isinstance(failed, EngineError) and failed.message == "no room"
    assert part == digest([("t0", TENSORS["t0"])])


def test_an_error_of_the_stream_is_raised_and_ends_the_readers():
    def broken():
        yield "t0", TENSORS["t0"]
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        relay(WeightStream(broken()), [reads, reads])


def test_another_error_of_a_reader_is_raised():
    def wrong(source):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        relay(WeightStream(reused()), [reads, wrong])


def test_a_reader_that_hangs(monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.http.relay._LIMIT_S", 0.1)
    held = threading.Event()

    def hangs(source):
        next(source.tensors)
        held.wait(10)
        return {}

    with pytest.raises(EngineError, match=r"a reader .* 0 s for one tensor"):
        relay(WeightStream(reused()), [reads, hangs])
    held.set()


def test_a_source_that_hangs_is_not_its_readers_fault(monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.http.relay._LIMIT_S", 0.1)

    def slow():
        yield "t0", TENSORS["t0"]
        time.sleep(0.5)
        yield "t1", TENSORS["t1"]

    def late_end():
        yield "t0", TENSORS["t0"]
        time.sleep(0.5)

    for tensors in (slow(), late_end()):
        with pytest.raises(EngineError, match=r"the source .* 0 s for one tensor"):
            relay(WeightStream(tensors), [reads, reads])
