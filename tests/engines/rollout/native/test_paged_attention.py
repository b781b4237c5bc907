"""Tests of attention over the paged cache. Without a GPU, Triton's kernels run under its interpreter."""

from importlib.util import find_spec

import pytest
import torch

from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.attention.cpu import CPUAttention, why_not_cpu
from tandem.engines.rollout.native.attention.torch import TorchAttention
from tandem.engines.rollout.native.paged import LayerShape, PagedCache, Sight
from tandem.errors import EngineError
from tests.engines.rollout.case import CPU
from tests.engines.rollout.native.paged_case import DECODE, MIXED, Case, threads
from tests.support.refusing import refused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NO_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
INTERPRETED = pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter has no product of bfloat16")


def triton(dtype, tolerance, *marks):
    return pytest.param("triton", dtype, tolerance, marks=[pytest.mark.triton, NO_TRITON, *marks])


every_attention = pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("torch", torch.float64, 1e-13),
        ("torch", torch.bfloat16, 4e-3),  # the rounding of the result
        ("cpu", torch.float32, 1e-6),
        ("cpu", torch.bfloat16, 4e-3),
        triton(torch.float32, 1e-6),
        triton(torch.float16, 1e-3),
        triton(torch.bfloat16, 1e-2, INTERPRETED),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)


def case_of(name, sequences, dtype, **shape):
    return Case(sequences, dtype, **shape, device=DEVICE if name == "triton" else CPU)


@every_attention
@pytest.mark.parametrize(
    ("window", "chunk", "softcap", "sinks"),
    [(1, 0, 0.0, False), (100, 0, 0.0, False), (0, 0, 3.0, False), (0, 0, 0.0, True), (0, 128, 0.0, False),
     (20, 0, 0.0, True), (5, 7, 2.0, True)],
)  # fmt: skip
@pytest.mark.parametrize("sequences", [MIXED, DECODE], ids=["mixed", "decode"])
def test_what_queries_see(name, dtype, tolerance, window, chunk, softcap, sinks, sequences):
    group = 7 if window else 1
    sinks_N = 2 * torch.randn(2 * group) + 1 if sinks else None
    sight = Sight(window, chunk, softcap, None if sinks_N is None else sinks_N.to(dtype))
    case = case_of(name, sequences, dtype, key_dim=32, group=group, sight=sight)
    case.query *= 3 if softcap else 1
    for count in (1, 2) if name == "cpu" else (1,):
        with threads(count):
            case.check(name, tolerance)


@every_attention
@pytest.mark.parametrize(
    ("group", "kv_heads", "key_dim", "value_dim", "block_size"),
    [
        (1, 2, 16, 16, 16),
        (7, 2, 64, 64, 32),
        (2, 1, 80, 80, 32),
        (9, 1, 128, 128, 16),
        (4, 1, 256, 256, 16),
        (2, 3, 160, 128, 16),
        (3, 3, 24, 40, 16),  # neither is a multiple of a vector
        (5, 1, 7, 9, 48),
    ],
)
@pytest.mark.parametrize("sequences", [[(130, 1), (40, 11), (33, 33), (1, 1)], [(33, 1), (65, 1)]])
def test_shapes(name, dtype, tolerance, group, kv_heads, key_dim, value_dim, block_size, sequences):
    shape = {"group": group, "kv_heads": kv_heads, "key_dim": key_dim, "value_dim": value_dim}
    case_of(name, sequences, dtype, **shape, block_size=block_size).check(name, tolerance)


def test_torch_in_pieces_of_any_block_size(monkeypatch):
    monkeypatch.setattr("tandem.engines.rollout.native.attention.torch._MAX_SCORES", 8000)
    Case(MIXED, value_dim=12, block_size=4).check("torch", 1e-13)


def test_scores_of_any_size():
    case = Case(DECODE, torch.float32, key_dim=64)
    case.query *= 300
    case.check("cpu", 2e-3)  # the error of float32 scores of thousands, after exponentiation


def test_nan_is_not_hidden():
    case = Case([(40, 1), (40, 1)], torch.float32)
    case.query[0, 1, 3] = torch.nan
    attention = make_attention(case.cache, "cpu")
    attention.write(0, case.step, case.new_keys, case.new_values)
    out = attention.attend(0, case.step, case.query)
    assert out[0, 1].isnan().all() and not out[1].isnan().any() and not out[0, 0].isnan().any()


@every_attention
def test_writes_every_token_into_its_slot_and_nothing_else(name, dtype, tolerance):
    case = case_of(name, [(20, 3), (9, 1), (7, 7)], dtype, kv_heads=3, key_dim=24, value_dim=40)
    case.step.slots_GT[0][[1, 3]] = -1  # tokens without a slot
    slots = case.step.slots_GT[0][case.step.slots_GT[0] >= 0]
    kept, blocks, offsets = case.step.slots_GT[0] >= 0, slots // 16, slots % 16
    cache, keys, values = case.cache, case.cache.keys[0].clone(), case.cache.values[0].clone()
    keys[blocks, :, :, offsets], values[blocks, :, offsets] = case.new_keys[kept], case.new_values[kept]
    joined = torch.cat((case.new_keys, case.new_values), -1)  # views of a wider projection
    make_attention(cache, name).write(0, case.step, joined[..., :24], joined[..., 24:])
    torch.testing.assert_close(cache.keys[0], keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.values[0], values, rtol=0, atol=0, equal_nan=True)


def test_auto_takes_the_kernels_where_they_can_run():
    assert isinstance(make_attention(Case(DECODE, torch.float32).cache), CPUAttention)
    assert isinstance(make_attention(Case(DECODE, torch.float64).cache), TorchAttention)
    odd = Case(DECODE, torch.float32, block_size=12).cache
    assert "12 tokens" in why_not_cpu(odd) and isinstance(make_attention(odd), TorchAttention)
    error = refused(EngineError, lambda: make_attention(odd, "cpu"), "12 tokens")
    assert error.field == "attention"  # an argument of the engine, not a config key
    wide = PagedCache([LayerShape(1, 16, 1024)], 2, 16, torch.float32, CPU)
    assert "1024" in why_not_cpu(wide)
