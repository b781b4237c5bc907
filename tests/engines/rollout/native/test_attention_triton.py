"""Tests of the Triton attention against a plain float64 reference.

Without a CUDA device the kernels run under Triton's interpreter, which `tests/conftest.py` turns on. If
Triton is not installed (a CPU build of PyTorch does not include it), these tests are skipped.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tandem.engines.rollout.base import SharedModule, generate
from tandem.engines.rollout.native.attention.triton import (
    Tiles,
    TritonAttention,
    split_count,
)
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.paged import LayerShape, PagedCache, StepInput
from tandem.errors import EngineError
from tandem.protocol import Request, SamplingParams

pytestmark = pytest.mark.triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
not_interpreted = pytest.mark.skipif(
    DEVICE.type == "cpu", reason="the interpreter has no product of bfloat16"
)


class Case:
    """Sequences of given lengths, each of which runs its last tokens. All other cache content is NaN."""

    def __init__(
        self, lengths, queries, *, group=2, heads=2, key_dim=32, value_dim=None, block_size=16, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        shape = LayerShape(heads, key_dim, value_dim or key_dim)
        blocks = [-(-length // block_size) for length in lengths]
        numbers = torch.randperm(sum(blocks) + 3, generator=generator)
        self.keys, self.values = [], []
        self.shape, self.lengths, self.queries, self.block_size = shape, lengths, queries, block_size
        self.blocks = len(numbers)
        # Entries beyond a sequence's length are any block. Here it is a block without content.
        tables = torch.full((len(lengths), max(blocks) + 2), int(numbers[-1]), dtype=torch.int32)
        slots, positions, taken = [], [], 0
        for row, (length, count) in enumerate(zip(lengths, queries, strict=True)):
            tables[row, : blocks[row]] = numbers[taken : taken + blocks[row]]
            taken += blocks[row]
            place = torch.arange(length)
            slot = tables[row, place // block_size].long() * block_size + place % block_size
            slots.append(slot)
            positions.append(place[length - count :])
            self.keys.append(
                torch.randn(length, heads, shape.key_dim, generator=generator, dtype=torch.float64)
            )
            self.values.append(
                torch.randn(length, heads, shape.value_dim, generator=generator, dtype=torch.float64)
            )
        self.slots = slots
        total = sum(queries)
        self.query = (
            torch.randn(total, heads * group, key_dim, generator=generator, dtype=torch.float64) * 0.5
        )
        self.step = StepInput(
            ids_T=torch.zeros(total, dtype=torch.int64, device=DEVICE),
            positions_T=torch.cat(positions).to(DEVICE),
            slots_T=torch.cat([s[len(s) - q :] for s, q in zip(slots, queries, strict=True)]).to(DEVICE),
            starts_S1=torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32, device=DEVICE),
            lengths_S=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            tables_SB=tables.to(DEVICE),
            logits_L=torch.arange(total, device=DEVICE),
            max_query=max(queries),
            max_length=max(lengths),
        )

    def cache(self, dtype):
        cache = PagedCache([self.shape], self.blocks, self.block_size, dtype, DEVICE)
        for part in (cache.keys[0], cache.values[0]):
            part.fill_(torch.nan)
        for slot, keys, values in zip(self.slots, self.keys, self.values, strict=True):
            block, offset = slot // self.block_size, slot % self.block_size
            cache.keys[0][block, :, :, offset] = keys.to(DEVICE, dtype)
            cache.values[0][block, :, offset] = values.to(DEVICE, dtype)
        return cache

    def reference(self, dtype, window=None, softcap=None):
        """Compute softmax attention token by token, on numbers rounded as in the cache."""
        query = self.query.to(dtype).double()
        group = query.shape[1] // self.shape.kv_heads
        out, token = [], 0
        for keys, values, length, count in zip(
            self.keys, self.values, self.lengths, self.queries, strict=True
        ):
            keys, values = keys.to(dtype).double(), values.to(dtype).double()
            for position in range(length - count, length):
                first = 0 if window is None else max(0, position - window + 1)
                seen = slice(first, position + 1)
                scores = torch.einsum("nd,cnd->nc", query[token], keys[seen].repeat_interleave(group, dim=1))
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out.append(
                    torch.einsum(
                        "nc,cnd->nd", scores.softmax(-1), values[seen].repeat_interleave(group, dim=1)
                    )
                )
                token += 1
        return torch.stack(out)

    def check(self, dtype=torch.float32, *, splits=None, **options):
        attention = TritonAttention(self.cache(dtype), splits=splits)
        out = attention.attend(0, self.step, self.query.to(DEVICE, dtype), **options)
        assert out.dtype == dtype and out.is_contiguous()
        limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(
            out.cpu().double(), self.reference(dtype, **options), rtol=limit, atol=limit
        )


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("block_size", [16, 32])
def test_decodes_sequences_of_any_length(group, block_size):
    Case([1, 16, 17, 70, 131], [1] * 5, group=group, block_size=block_size).check()


@pytest.mark.parametrize("splits", [2, 8])
def test_splits_of_long_contexts_add_up(splits):
    Case([700, 3, 2100, 257], [1] * 4, group=7, heads=1).check(splits=splits)


@pytest.mark.parametrize("group", [1, 4, 7])
def test_mixes_prompts_chunks_and_decoding(group):
    """Whole prompts, a chunk over cached context, and single tokens, in tiles that end anywhere."""
    Case([40, 300, 1, 90, 150], [40, 1, 1, 33, 141], group=group, block_size=32).check()


@pytest.mark.parametrize("window", [1, 5, 64, 100])
@pytest.mark.parametrize("queries", [[1, 1, 1], [37, 1, 60]])
def test_a_window_hides_older_columns(window, queries):
    Case([37, 250, 133], queries, group=2).check(window=window)


def test_a_window_with_splits():
    Case([2000, 37], [1, 1]).check(window=1100, splits=4)


@pytest.mark.parametrize("queries", [[1, 1], [45, 2]])
def test_softcap(queries):
    case = Case([45, 90], queries)
    case.query *= 8
    case.check(softcap=3.0)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 8), (80, 80), (48, 24), (160, 128)])
def test_head_sizes_that_are_no_power_of_two(key_dim, value_dim):
    Case([33, 65], [1, 1], key_dim=key_dim, value_dim=value_dim, heads=3).check()
    Case([33, 65], [33, 2], key_dim=key_dim, value_dim=value_dim, heads=3).check()


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=not_interpreted)], ids=str
)
@pytest.mark.parametrize("queries", [[1, 1], [50, 7]])
def test_half_precision(dtype, queries):
    Case([50, 130], queries, group=4, key_dim=32).check(dtype)


def test_queries_need_be_neither_contiguous_nor_of_the_caches_type():
    case = Case([33, 65], [1, 1])
    both = torch.cat((case.query, torch.full_like(case.query, torch.nan)), 1).to(DEVICE, torch.float32)
    attention = TritonAttention(case.cache(torch.float32))
    query = both[:, : case.query.shape[1]]
    expected = attention.attend(0, case.step, query.contiguous())
    torch.testing.assert_close(attention.attend(0, case.step, query), expected, rtol=0, atol=0)
    half = TritonAttention(case.cache(torch.float16))
    out = half.attend(0, case.step, query)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, half.attend(0, case.step, query.half()), rtol=0, atol=0)
    across = query.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(attention.attend(0, case.step, across), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_every_token_into_its_slot_and_nothing_else(dtype):
    case = Case([20, 7], [20, 7], heads=3, key_dim=24, value_dim=40)
    expected, cache = case.cache(dtype), case.cache(dtype)
    for part in (cache.keys[0], cache.values[0]):
        part.fill_(torch.nan)
    dropped = 5
    case.step.slots_T[dropped] = -1
    slot = case.slots[0][dropped]
    block, offset = slot // case.block_size, slot % case.block_size
    expected.keys[0][block, :, :, offset] = torch.nan
    expected.values[0][block, :, offset] = torch.nan
    keys, values = torch.cat(case.keys).to(DEVICE, dtype), torch.cat(case.values).to(DEVICE, dtype)
    joined = torch.cat((keys, values), -1)  # views of a wider projection
    TritonAttention(cache).write(0, case.step, joined[..., :24], joined[..., 24:])
    for part, wanted in ((cache.keys[0], expected.keys[0]), (cache.values[0], expected.values[0])):
        torch.testing.assert_close(part, wanted, rtol=0, atol=0, equal_nan=True)


def test_splits_fill_the_processors_and_none_is_short():
    assert split_count(programs=1, columns=64 * 1024, processors=132) == 64
    assert split_count(programs=128, columns=16 * 1024, processors=132) == 4
    assert split_count(programs=528, columns=16 * 1024, processors=132) == 1
    assert split_count(programs=2048, columns=16 * 1024, processors=132) == 1
    assert split_count(programs=8, columns=1024, processors=132) == 4
    assert split_count(programs=8, columns=128, processors=132) == 1


def test_a_tile_holds_all_query_heads_of_a_token():
    for group in (1, 7, 16, 71, 200):
        for decode in (False, True):
            assert Tiles.of(LayerShape(1, 64, 64), group, torch.bfloat16, decode).rows >= group


def test_float64_is_refused():
    with pytest.raises(EngineError, match=r"attention: (.|\n)*float64(.|\n)*with attention=torch"):
        TritonAttention(PagedCache([LayerShape(1, 16, 16)], 2, 16, torch.float64, DEVICE))


def test_the_engine_writes_the_same_over_it(tiny, prompts):
    """Covers chunked prompts, shared prefixes, steps that mix prompts and decoding, and pure decoding."""
    requests = [
        Request(f"p{index}", 0, prompts[index % 4], SamplingParams(max_tokens=3 + index, temperature=0.0))
        for index in range(6)
    ]
    module = tiny("mistral_window").to(DEVICE)
    tokens = []
    for attention in ("triton", "torch"):
        engine = NativeEngine(
            device=DEVICE, max_length=64, max_num_seqs=4, max_num_batched_tokens=24, attention=attention
        )
        engine.update_weights(SharedModule(module), 0)
        tokens.append({sample.id: sample.token_ids.tolist() for sample in generate(engine, requests)})
    assert tokens[0] == tokens[1]
