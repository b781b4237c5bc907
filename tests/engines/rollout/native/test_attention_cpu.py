import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

from tandem.engines.rollout.native.kernels import load_kernels
from tandem.engines.rollout.native.ops.base import Heads
from tandem.engines.rollout.native.ops.cpu import CPUOps
from tandem.engines.rollout.native.ops.torch import TorchOps
from tests.engines.rollout.native.paged_case import threads


def cpu_and_torch(dtype, rotated=24):
    """Return both implementations for 6 query heads and 2 key heads of 24 numbers."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(50, rotated // 2, generator=generator).repeat(1, 2) * 6
    angles = F.pad(angles, (0, 24 - rotated))
    heads = Heads(6, 2, 24, angles.cos().to(dtype), angles.sin().to(dtype), 24**-0.5, rotated)
    kernels = load_kernels(dtype)
    assert kernels is not None
    return CPUOps(heads, 1e-5, kernels), TorchOps(heads, 1e-5)


def assert_equal_up_to_one_rounding(got, expected, size=None):
    """Assert that bf16 results equal PyTorch's, with a few exceptions.

    Where an intermediate float32 value is close to a tie, the result moves by the last place of that value
    and by its own last place: by 2^-6 of `size` (by default, of the result).
    """
    if got.dtype != torch.bfloat16:
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-6)
        return
    assert (got != expected).float().mean() < 0.01
    got, expected = got.float(), expected.float()
    assert ((got - expected).abs() <= 2**-6 * (expected if size is None else size).abs() + 1e-6).all()


def rotated_pairs(heads, rotated):
    """Return the length of each pair of numbers that is rotated together. A rotation does not change it."""
    pairs = torch.hypot(*heads[..., :rotated].float().chunk(2, dim=-1))
    return torch.cat([pairs, pairs, heads[..., rotated:].float()], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 77])
class TestOps:
    @pytest.fixture(params=[1, 2], autouse=True)
    def threads(self, request):
        with threads(request.param):
            yield

    def test_norms(self, dtype, rows):
        x, added, weight = (torch.randn(shape).to(dtype) for shape in ((rows, 203), (rows, 203), 203))
        cpu, reference = cpu_and_torch(dtype)
        for more in (None, added):
            expected_sum, expected = reference.norm(x.clone(), more, weight)
            got_sum, got = cpu.norm(x.clone(), more, weight)
            assert torch.equal(got_sum, expected_sum)
            assert_equal_up_to_one_rounding(got, expected)

    @pytest.mark.parametrize(("normed", "rotated"), [(True, 24), (False, 24), (True, 12)])
    def test_rotation(self, dtype, rows, normed, rotated):
        qkv, positions = torch.randn(rows, 10 * 24).to(dtype), torch.randint(0, 50, (rows,))
        norm = torch.randn(8, 24).to(dtype) if normed else None
        cpu, reference = cpu_and_torch(dtype, rotated)
        expected = reference.rotate(qkv.clone(), positions, norm)
        query, keys, values = cpu.rotate(qkv.clone(), positions, norm)
        assert query.dtype == torch.float32  # scaled and not rounded again
        for got, wanted in ((query.to(dtype), expected[0]), (keys, expected[1])):
            assert_equal_up_to_one_rounding(got, wanted, rotated_pairs(wanted, rotated))
        assert torch.equal(values, expected[2])

    def test_gate(self, dtype, rows):
        gate_up = (torch.randn(rows, 2 * 1003) * 5).to(dtype)
        cpu, reference = cpu_and_torch(dtype)
        assert_equal_up_to_one_rounding(cpu.gate(gate_up), reference.gate(gate_up))


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


def use(folder, **environment):
    """Return the attention that a fresh process chooses, and its warnings."""
    variables = {**os.environ, "TANDEM_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", **environment}
    command, options = [sys.executable, "-c", USE], {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, env=variables, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


@pytest.mark.parametrize(("compiler", "reason"), [("", "no C++ compiler"), ("broken", "cannot find omp.h")])
def test_without_a_working_compiler_pytorch_does_it_and_says_why(tmp_path, compiler, reason):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'cannot find omp.h' >&2\nexit 1\n")
    broken.chmod(0o755)
    variables = {"CXX": str(broken)} if compiler else {"PATH": "", "CXX": ""}
    kind, *said = use(tmp_path, **variables)
    assert kind == "TorchAttention"
    assert len(said) == 1 and reason in said[0]


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
