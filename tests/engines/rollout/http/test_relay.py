import threading
import time

import pytest
import torch

from tandem.engines.rollout.base import WeightStream
from tandem.engines.rollout.http.relay import relay
from tandem.engines.weight_sync import digest
from tandem.errors import EngineError
from tests.support.refusing import refused

TENSORS = {f"t{i}": torch.full((4,), float(i)) for i in range(6)}


def stream(names=TENSORS, end=None):
    """Return a stream in which each tensor is overwritten when the next one is requested. Then call `end`."""

    def tensors():
        room = torch.empty(4)
        for name in names:
            yield name, room.copy_(TENSORS[name])
        if end is not None:
            end()

    return WeightStream(tensors())


def reads(source):
    return digest((name, tensor.clone()) for name, tensor in source.tensors)


def stops_early(source):
    return digest([next(source.tensors)])


def fails(error):
    def read(source):
        next(source.tensors)
        raise error

    return read


def test_all_see_every_tensor_while_it_is_valid_though_others_fail_or_stop():
    readers = [reads, fails(EngineError("no room")), stops_early, reads]
    first, failed, part, last = relay(stream(), readers)
    assert first == last == digest(TENSORS.items())
    assert isinstance(failed, EngineError) and failed.message == "no room"
    assert part == digest([("t0", TENSORS["t0"])])


@pytest.mark.parametrize("of", ["the stream", "a reader"])
def test_another_error_is_raised_and_ends_the_readers(of):
    def lost():
        raise OSError("lost")

    source = stream(["t0"], lost) if of == "the stream" else stream()
    with pytest.raises(OSError, match="lost"):
        relay(source, [reads, reads if of == "the stream" else fails(OSError("lost"))])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_reader_or_a_source_that_hangs_is_named(monkeypatch, count):
    monkeypatch.setattr("tandem.engines.rollout.http.relay._LIMIT_S", 0.1)
    held = threading.Event()

    def tensors():
        for name in list(TENSORS)[:count]:
            yield name, TENSORS[name]
            time.sleep(0.5)

    def hangs(source):
        next(source.tensors)
        held.wait(10)
        return {}

    who, source = ("the source", WeightStream(tensors())) if count else ("a reader", stream())
    readers = [reads, reads if count else hangs]
    refused(EngineError, lambda: relay(source, readers), rf"{who} .* 0 s for one tensor")
    held.set()
