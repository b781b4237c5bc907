"""The parts of experts on several vLLM ranks have the checksum of the whole weights in transformers."""

from types import SimpleNamespace

import pytest
import torch

from tandem.engines.weight_sync import checksum
from tests.support.marks import slow_but

pytestmark = pytest.mark.vllm
shards = pytest.importorskip("tandem.engines.rollout.vllm.shards", exc_type=ImportError)
E, INNER, OUTER = 3, 8, 6


def parts_of(kind, leaf, whole, rank, size):
    """Return what a rank of vLLM holds of a weight in transformers."""
    held = whole.transpose(1, 2) if kind != "qwen3_moe" and whole.dim() == 3 else whole
    if leaf == "w2_weight":
        return held.chunk(size, 2)[rank]
    halves = [held] if kind == "gpt_oss" else held.chunk(2, 1)
    return torch.cat([half.chunk(size, 1)[rank] for half in halves], 1)


@pytest.mark.parametrize("size", slow_but([2], [1, 2, 4]))
@pytest.mark.parametrize("kind", ["qwen3_moe", "llama4_text", "gpt_oss"])
@pytest.mark.parametrize("leaf", ["w13_weight", "w2_weight", "w13_bias"])
def test_the_parts_add_up(kind, leaf, size):
    shape = (E, OUTER, INNER) if leaf == "w2_weight" else (E, 2 * INNER, OUTER)
    if leaf == "w13_bias":
        shape = shape[:2]
    whole = torch.randn(shape)
    if kind != "qwen3_moe" and leaf != "w13_bias":
        whole = whole.transpose(1, 2).contiguous()
    total = torch.zeros((), dtype=torch.int64)
    for rank in range(size):
        layer = SimpleNamespace(moe_config=SimpleNamespace(tp_rank=rank, tp_size=size))
        for part in shards._experts(
            "mlp.experts", leaf, layer, parts_of(kind, leaf, whole, rank, size), kind
        ):
            place = {"first_column": part.first_column, "columns": part.columns}
            total += checksum(part.tensor, part.first_row, **place)
            assert part.name.removeprefix("mlp.experts.") in (
                "gate_up_proj",
                "down_proj",
                "gate_up_proj_bias",
            )
    assert total == checksum(whole)
