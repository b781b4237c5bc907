"""Tests of the compiled kernels against PyTorch: attention over shapes, and the other operations."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor

from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.kernels import load_kernels
from tandem.engines.rollout.native.ops.base import Heads
from tandem.engines.rollout.native.ops.cpu import CPUOps
from tandem.engines.rollout.native.ops.torch import TorchOps
from tests.engines.rollout.native.paged_case import DECODE, MIXED, OPTIONS, Case

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # bf16: the rounding of the result
DTYPES = list(TOLERANCE)


@pytest.fixture(params=[1, 2], ids=["1_thread", "2_threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
@pytest.mark.parametrize("sequences", [MIXED, DECODE], ids=["mixed", "decode"])
def test_attention(sequences, window, softcap, dtype):
    Case(sequences, dtype, key_dim=32).check("cpu", TOLERANCE[dtype], window, softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "kv_heads", "key_dim", "value_dim", "block_size"),
    [
        (1, 2, 16, 16, 16),
        (7, 2, 64, 64, 32),
        (2, 1, 80, 80, 32),
        (9, 1, 128, 128, 16),
        (4, 1, 256, 256, 16),
        (3, 3, 24, 40, 16),  # neither is a multiple of a vector
        (5, 1, 7, 9, 48),
    ],
)
def test_shapes(dtype, group, kv_heads, key_dim, value_dim, block_size):
    Case(
        [(130, 1), (40, 11), (1, 1)],
        dtype,
        group=group,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
    ).check("cpu", TOLERANCE[dtype])


def test_scores_of_any_size():
    """No maximum is assumed: scores of thousands neither overflow nor vanish."""
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


def test_what_lies_beyond_a_sequence_does_not_matter():
    case = Case([(37, 1), (20, 4)], torch.float32)
    for table, length in zip(case.step.tables_SB, (37, 20), strict=True):
        block, offset = table[length // 16], length % 16
        case.cache.keys[0][block, :, :, offset:] = torch.nan
        case.cache.values[0][block, :, offset:] = torch.nan
    case.check("cpu", 1e-6)


def cpu_and_torch(dtype: torch.dtype) -> tuple[CPUOps, TorchOps]:
    """Return both implementations for 6 query heads and 2 key heads of 24 numbers."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(50, 12, generator=generator).repeat(1, 2) * 6
    heads = Heads(6, 2, 24, angles.cos().to(dtype), angles.sin().to(dtype), 24**-0.5)
    kernels = load_kernels(dtype)
    assert kernels is not None
    return CPUOps(heads, 1e-5, kernels), TorchOps(heads, 1e-5)


def assert_equal_up_to_one_rounding(
    got: Tensor, expected: Tensor, dtype: torch.dtype, size: Tensor | None = None
) -> None:
    """Assert that bf16 results equal PyTorch's, with a few exceptions.

    Where an intermediate float32 value is close to a tie, the result moves by the last place of that value
    and by its own last place: by 2^-6 of `size` (by default, of the result).
    """
    if dtype != torch.bfloat16:
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-6)
        return
    assert (got != expected).float().mean() < 0.01
    got, expected = got.float(), expected.float()
    assert ((got - expected).abs() <= 2**-6 * (expected if size is None else size).abs() + 1e-6).all()


def rotated_pairs(heads: Tensor) -> Tensor:
    """Return the length of each pair of numbers that is rotated together. A rotation does not change it."""
    pairs = torch.hypot(*heads.float().chunk(2, dim=-1))
    return torch.cat([pairs, pairs], dim=-1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 77])
class TestOps:
    def test_norms(self, dtype, rows):
        x, added, weight = (
            torch.randn(rows, 203).to(dtype),
            torch.randn(rows, 203).to(dtype),
            torch.randn(203),
        )
        cpu, reference = cpu_and_torch(dtype)
        got, expected = (ops.norm(x, None, weight.to(dtype))[1] for ops in (cpu, reference))
        assert_equal_up_to_one_rounding(got, expected, dtype)
        expected_sum, expected = reference.norm(x, added, weight.to(dtype))
        got_sum, got = cpu.norm(x.clone(), added, weight.to(dtype))
        assert torch.equal(got_sum, expected_sum)
        assert_equal_up_to_one_rounding(got, expected, dtype)

    @pytest.mark.parametrize("normed", [True, False])
    def test_rotation(self, dtype, rows, normed):
        qkv, positions = torch.randn(rows, 10 * 24).to(dtype), torch.randint(0, 50, (rows,))
        norm = torch.randn(8, 24).to(dtype) if normed else None
        cpu, reference = cpu_and_torch(dtype)
        expected = reference.rotate(qkv.clone(), positions, norm)
        query, keys, values = cpu.rotate(qkv.clone(), positions, norm)
        assert query.dtype == torch.float32  # scaled and not rounded again
        for got, wanted in ((query.to(dtype), expected[0]), (keys, expected[1])):
            assert_equal_up_to_one_rounding(got, wanted, dtype, rotated_pairs(wanted))
        assert torch.equal(values, expected[2])

    def test_gate(self, dtype, rows):
        gate_up = (torch.randn(rows, 2 * 1003) * 5).to(dtype)
        cpu, reference = cpu_and_torch(dtype)
        assert_equal_up_to_one_rounding(cpu.gate(gate_up), reference.gate(gate_up), dtype)


def test_infinite_and_missing_numbers_stay_visible():
    cpu, _ = cpu_and_torch(torch.bfloat16)
    gate_up = torch.ones(1, 64, dtype=torch.bfloat16)
    gate_up[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    out = cpu.gate(gate_up)
    assert not out[0, :3].isfinite().any() and out[0, 3:].isfinite().all()


USE = """
import torch, warnings
from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.paged import LayerShape, PagedCache
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        cache = PagedCache([LayerShape(1, 16, 16)], 2, 16, torch.float32, torch.device("cpu"))
        kind = type(make_attention(cache)).__name__
print(kind, *(warning.message for warning in caught), sep="|")
"""


def use(folder: object, **environment: str) -> list[str]:
    """Return the attention that a fresh process chooses, and its warnings."""
    variables = {**os.environ, "TANDEM_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", USE], env=variables, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def test_without_a_compiler_pytorch_does_it(tmp_path):
    kind, *said = use(tmp_path, PATH="", CXX="")
    assert kind == "TorchAttention"
    assert len(said) == 1 and "no C++ compiler" in said[0]


def test_a_compiler_that_fails_is_quoted(tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'cannot find omp.h' >&2\nexit 1\n")
    compiler.chmod(0o755)
    kind, *said = use(tmp_path, CXX=str(compiler))
    assert kind == "TorchAttention"
    assert len(said) == 1 and "cannot find omp.h" in said[0]


@pytest.mark.slow
def test_the_library_is_made_once_and_runs_on_pytorchs_threads(tmp_path, monkeypatch):
    assert use(tmp_path) == ["CPUAttention"]
    (library,) = tmp_path.glob("*.so")
    made = library.stat().st_mtime_ns
    assert use(tmp_path) == ["CPUAttention"]
    assert [(p, p.stat().st_mtime_ns) for p in tmp_path.iterdir()] == [(library, made)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_kernels(torch.float32) is not None
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if "libgomp" in line}) == 1
