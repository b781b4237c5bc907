import pytest
import torch

from tandem import device as devices
from tandem.engines.rollout.draws import rows as rows_module
from tandem.engines.rollout.draws.sampler import Drawn
from tandem.engines.rollout.native import engine as engine_module
from tandem.engines.rollout.native import flight as flight_module
from tandem.engines.rollout.native import plan as plan_module
from tests.engines.rollout.case import native, request


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_step_that_decodes_takes_one_copy(tiny, monkeypatch, run_ahead):
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
