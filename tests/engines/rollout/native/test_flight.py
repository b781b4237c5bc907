"""Tests of the data that a step sends to the device and fetches from it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem import device as devices
from tandem.engines.rollout.draws import rows as rows_module
from tandem.engines.rollout.draws.sampler import Drawn
from tandem.engines.rollout.native import engine as engine_module
from tandem.engines.rollout.native import flight as flight_module
from tandem.engines.rollout.native import plan as plan_module
from tandem.engines.rollout.native.flight import Flight, in_flight
from tandem.engines.rollout.native.plan import Plan
from tests.engines.rollout.case import native, request


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_step_that_decodes_takes_one_copy(tiny, monkeypatch, run_ahead):
    """When sequences have ended, the parameters of the remaining rows are the only further copy."""
    sent, uploads = [], []
    send, upload = devices.to_device, devices.upload
    monkeypatch.setattr(plan_module, "to_device", lambda *args: (sent.append(1), send(*args))[1])
    for module in (engine_module, rows_module):
        monkeypatch.setattr(module, "upload", lambda *args: (uploads.append(1), upload(*args))[1])
    engine, rest = native(tiny(), max_length=64, run_ahead=run_ahead), 0
    engine.submit([request(f"r{i}", prompt=3 + i, max_tokens=n) for i, n in enumerate((30, 30, 30, 20))])
    engine.poll(0.0)
    for step in range(18):
        sent.clear()
        uploads.clear()
        engine.poll(0.0)
        assert len(sent) == 1 and not uploads, step
    while engine.pending():
        engine.poll(0.0)
        rest += 1
    assert len(sent) <= rest + 1 and not uploads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_was_drawn_comes_back_as_it_went(dtype):
    tokens, one, two = torch.tensor([3, 1 << 40, 0]), torch.randn(3, dtype=dtype), torch.randn(3, dtype=dtype)
    for drawn in (Drawn(tokens, one, one, one), Drawn(tokens, one, two, two)):
        parts = list({id(part): part for part in drawn}.values())
        joined = flight_module._join_bytes(parts)
        assert joined.dtype == torch.uint8 and len(joined) == 3 * (8 + (len(parts) - 1) * dtype.itemsize)
        for part, back in zip(parts, flight_module._split_bytes(joined, parts), strict=True):
            assert back.dtype == part.dtype and torch.equal(back, part)


def test_tokens_in_flight_are_put_where_they_are_read():
    drawn = Drawn(torch.tensor([11, 12, 13]), *[torch.zeros(3)] * 3)
    flight = Flight.of(np.array([2, -1, 0]), drawn, 1)
    place = in_flight(flight, 4)
    assert place.tolist() == [2, -1, 0, -1] and in_flight(None, 2).tolist() == [-1, -1]
    ids = torch.tensor([0, 1, 2, 3])
    flight.insert(ids, [torch.from_numpy(part) for part in flight.wanted(place)])
    assert ids.tolist() == [13, 1, 11, 3]
    straight = Flight.of(np.array([0, 1, 2]), drawn, 1)
    assert straight.wanted(in_flight(straight, 3)) == ()
    ids = torch.zeros(5, dtype=torch.int64)
    straight.insert(ids, ())
    assert ids.tolist() == [11, 12, 13, 0, 0]


def test_a_plan_taken_apart_is_whole():
    columns = {"rows": [4, 2, 7, 1], "first": [9, 5, 0, 8], "counts": [1, 1, 3, 1]}
    columns |= {"sampled": [4, 2, 7, 6, 1], "source": [0, 1, 2, 2, 3]}
    arrays = {name: np.array(column) for name, column in columns.items()}
    plan = Plan(**arrays, decoding=2, copies=([3], [5]))
    decoding, prompts = plan.apart()
    assert (decoding.decoding, prompts.decoding) == (2, 0)
    for name in ("rows", "first", "counts", "sampled"):
        assert [*getattr(decoding, name), *getattr(prompts, name)] == columns[name]
    assert decoding.source.tolist() == [0, 1] and prompts.source.tolist() == [0, 0, 1]
    ones = replace(plan, counts=np.ones(4, dtype=np.int64))
    for whole in (prompts, decoding, ones):  # a step with one token per row is a decode step
        [same] = whole.apart()
        assert same is whole
