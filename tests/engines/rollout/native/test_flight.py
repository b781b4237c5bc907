"""Tests of the data that a step sends to the device and fetches from it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem import device as devices
from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.draws import rows as rows_module
from tandem.engines.rollout.draws.sampler import Drawn
from tandem.engines.rollout.native import engine as engine_module
from tandem.engines.rollout.native import flight as flight_module
from tandem.engines.rollout.native import plan as plan_module
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.flight import Flight, in_flight
from tandem.engines.rollout.native.plan import Plan
from tandem.protocol import Request, SamplingParams

CPU = torch.device("cpu")


def requests_of(count, tokens):
    return [
        Request(f"r{i}", 0, np.arange(1, 4 + i), SamplingParams(max_tokens=int(n)))
        for i, n in enumerate(np.broadcast_to(tokens, count))
    ]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_step_that_decodes_takes_one_copy(tiny, monkeypatch, run_ahead):
    """When sequences have ended, the parameters of the remaining rows are the only further copy."""
    sent, uploads = [], []
    send, upload = devices.to_device, devices.upload
    monkeypatch.setattr(
        plan_module,
        "to_device",
        lambda tensors, device: (sent.append(len(tensors)), send(tensors, device))[1],
    )
    for module in (engine_module, rows_module):
        monkeypatch.setattr(
            module, "upload", lambda array, device: (uploads.append(array.dtype), upload(array, device))[1]
        )
    engine = NativeEngine(device=CPU, max_length=64, run_ahead=run_ahead)
    engine.update_weights(SharedModule(tiny()), 0)
    engine.submit(requests_of(4, [30, 30, 30, 20]))
    engine.poll(0.0)
    for step in range(18):
        sent.clear()
        uploads.clear()
        engine.poll(0.0)
        assert len(sent) == 1 and not uploads, step
    rest = 0
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
    wanted = flight.wanted(place)
    flight.insert(ids, [torch.from_numpy(part) for part in wanted])
    assert ids.tolist() == [13, 1, 11, 3]
    straight = Flight.of(np.array([0, 1, 2]), drawn, 1)
    assert straight.wanted(in_flight(straight, 3)) == ()
    ids = torch.zeros(5, dtype=torch.int64)
    straight.insert(ids, ())
    assert ids.tolist() == [11, 12, 13, 0, 0]


def test_prompts_apart_from_rows_that_decode_give_the_same(tiny, make_requests, monkeypatch):
    """Prompts arrive in chunks while others decode, and samples share them."""
    model = tiny(dtype=torch.float64)
    requests = make_requests(30, 3)
    options = {"device": CPU, "max_length": 128, "max_num_seqs": 12, "max_num_batched_tokens": 32}
    runs, shapes = [], []
    for apart in (False, True):
        engine = NativeEngine(**options)
        engine._split_steps = apart
        engine.update_weights(SharedModule(model), 0)
        forward, seen = engine._steps.forward, []

        def noted(step, attention, forward=forward, seen=seen):
            counts = step.starts_S1.diff().tolist()
            seen.append((counts.count(1), len(counts)))
            return forward(step, attention)

        monkeypatch.setattr(engine._steps, "forward", noted)
        runs.append(generate(engine, requests))
        shapes.append(seen)
    assert len(shapes[1]) > len(shapes[0])
    for left, right in zip(*runs, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        np.testing.assert_allclose(left.log_probs, right.log_probs, rtol=0, atol=1e-12)


def test_a_plan_taken_apart_is_whole():
    plan = Plan(
        rows=np.array([4, 2, 7, 1]),
        first=np.array([9, 5, 0, 8]),
        counts=np.array([1, 1, 3, 1]),
        decoding=2,
        sampled=np.array([4, 2, 7, 6, 1]),
        source=np.array([0, 1, 2, 2, 3]),
        copies=([3], [5]),
    )
    decoding, prompts = plan.apart()
    assert (decoding.decoding, prompts.decoding) == (2, 0)
    for name in ("rows", "first", "counts", "sampled"):
        assert np.array_equal(np.concatenate([getattr(p, name) for p in plan.apart()]), getattr(plan, name))
    assert decoding.source.tolist() == [0, 1] and prompts.source.tolist() == [0, 0, 1]
    assert prompts.rows[prompts.source].tolist() == plan.rows[plan.source[2:]].tolist()
    ones = replace(plan, counts=np.ones(4, dtype=np.int64))
    for whole in (prompts, decoding, ones):  # a step with one token per row is a decode step
        [same] = whole.apart()
        assert same is whole
