"""Tests of every attention over the paged cache against a slow float64 reference."""

from __future__ import annotations

import pytest
import torch

from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.attention.cpu import CPUAttention, why_not_cpu
from tandem.engines.rollout.native.attention.torch import TorchAttention
from tandem.engines.rollout.native.paged import LayerShape, PagedCache
from tandem.errors import EngineError
from tests.engines.rollout.native.paged_case import CPU, DECODE, MIXED, OPTIONS, Case


@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
@pytest.mark.parametrize("sequences", [MIXED, DECODE], ids=["mixed", "decode"])
def test_torch(sequences, window, softcap):
    Case(sequences, value_dim=12, block_size=4).check("torch", 1e-13, window, softcap)


def test_torch_in_pieces(monkeypatch):
    """Long prompts are processed in parts whose scores fit in memory."""
    monkeypatch.setattr("tandem.engines.rollout.native.attention.torch._MAX_SCORES", 8000)
    Case(MIXED).check("torch", 1e-13)


def test_torch_computes_bf16_in_float32():
    case = Case(MIXED, torch.bfloat16)
    case.check("torch", 4e-3)  # the rounding of the result


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_tokens_without_a_slot_write_nothing(name):
    case = Case([(20, 3), (9, 1)], torch.float32)
    kept = torch.ones(4, dtype=torch.bool)
    case.step.slots_T[[1, 3]] = -1
    kept[[1, 3]] = False
    before = [part.clone() for part in (case.cache.keys[0], case.cache.values[0])]
    make_attention(case.cache, name).write(0, case.step, case.new_keys, case.new_values)
    blocks, offsets = case.step.slots_T[kept] // 16, case.step.slots_T[kept] % 16
    assert torch.equal(case.cache.keys[0][blocks, :, :, offsets], case.new_keys[kept])
    assert torch.equal(case.cache.values[0][blocks, :, offsets], case.new_values[kept])
    for old, new, dims in zip(
        before, (case.cache.keys[0], case.cache.values[0]), ((1, 2), (1, 3)), strict=True
    ):
        changed = (old != new).any(dims[1]).any(dims[0])
        assert changed.sum() == kept.sum()


def test_auto_takes_the_kernels_where_they_can_run():
    assert isinstance(make_attention(Case(DECODE, torch.float32).cache), CPUAttention)
    assert isinstance(make_attention(Case(DECODE, torch.float64).cache), TorchAttention)
    odd = Case(DECODE, torch.float32, block_size=12).cache
    assert "12 tokens" in why_not_cpu(odd)
    assert isinstance(make_attention(odd), TorchAttention)
    with pytest.raises(EngineError, match="12 tokens") as caught:
        make_attention(odd, "cpu")
    assert caught.value.field == "attention"  # an argument of the engine, not a config key
    wide = PagedCache([LayerShape(1, 16, 1024)], 2, 16, torch.float32, CPU)
    assert "1024" in why_not_cpu(wide)
