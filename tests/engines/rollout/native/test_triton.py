import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from tandem.engines.rollout.base import generate
from tandem.engines.rollout.native.attention.triton import Tiles, TritonAttention, split_count
from tandem.engines.rollout.native.ops.base import Heads
from tandem.engines.rollout.native.ops.torch import TorchOps
from tandem.engines.rollout.native.ops.triton import TritonOps
from tandem.engines.rollout.native.paged import LayerShape, PagedCache, Sight
from tandem.errors import EngineError
from tests.engines.rollout.case import native, request, tokens
from tests.engines.rollout.native.paged_case import Case

pytestmark = pytest.mark.triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("splits", "sight"), [
    (2, Sight()), (8, Sight(sinks_N=torch.ones(7))), (4, Sight(1100)), (4, Sight(chunk=900)),
])  # fmt: skip
def test_splits_of_long_contexts_add_up(splits, sight):
    options = {"group": 7, "kv_heads": 1, "device": DEVICE, "sight": sight}
    case = Case([(700, 1), (3, 1), (2100, 1), (257, 1)], torch.float32, **options)
    case.check(TritonAttention(case.cache, splits=splits), 1e-6)


def test_queries_need_be_neither_contiguous_nor_of_the_caches_type():
    case = Case([(33, 1), (65, 1)], torch.float32, device=DEVICE)
    attention = TritonAttention(case.cache)
    case.check(attention, 1e-6)
    query = torch.cat((case.query, torch.full_like(case.query, torch.nan)), 1)[:, : case.query.shape[1]]
    expected = attention.attend(0, case.step, query.contiguous())
    for other in (query, query.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.testing.assert_close(attention.attend(0, case.step, other), expected, rtol=0, atol=0)
    half = Case([(33, 1), (65, 1)], torch.float16, device=DEVICE)
    attention = TritonAttention(half.cache)
    half.check(attention, 1e-3)
    out = attention.attend(0, half.step, query)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, attention.attend(0, half.step, query.half()), rtol=0, atol=0)


@pytest.mark.parametrize(("programs", "columns", "splits"), [
    (1, 64 * 1024, 64), (128, 16 * 1024, 4), (528, 16 * 1024, 1), (2048, 16 * 1024, 1), (8, 1024, 4),
    (8, 128, 1),
])  # fmt: skip
def test_splits_fill_the_processors_and_none_is_short(programs, columns, splits):
    assert split_count(programs=programs, columns=columns, processors=132) == splits


def test_a_tile_holds_all_query_heads_of_a_token():
    for group in (1, 7, 16, 71, 200):
        for decode in (False, True):
            assert Tiles.of(LayerShape(1, 64, 64), group, torch.bfloat16, decode).rows >= group


def test_float64_is_refused():
    with pytest.raises(EngineError, match=r"attention: (.|\n)*float64(.|\n)*with attention=torch"):
        TritonAttention(PagedCache([LayerShape(1, 16, 16)], 2, 16, torch.float64, DEVICE))


def test_the_engine_writes_the_same_over_it(tiny, prompts):
    requests = [request(f"p{i}", 0, prompts[i % 4], max_tokens=3 + i, temperature=0.0) for i in range(6)]
    options = {"device": DEVICE, "max_length": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    module = tiny("mistral_window").to(DEVICE)
    runs = [generate(native(module, attention=name, **options), requests) for name in ("triton", "torch")]
    assert tokens(runs[0]) == tokens(runs[1])


ROWS, EPS = 5, 1e-3
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
every_dtype = pytest.mark.parametrize("dtype", LIMITS, ids=str)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def both(dtype, heads=3, kv_heads=1, dim=24, rotated=24):
    """Return Triton ops of this dtype, and PyTorch ops in float64."""
    angles = [random(50, rotated, seed=seed).to(dtype) for seed in (1, 2)]
    angles = [F.pad(part, (0, dim - rotated), value=rest) for part, rest in zip(angles, (1, 0), strict=True)]
    made = Heads(heads, kv_heads, dim, *angles, dim**-0.5, rotated)
    wide = Heads(heads, kv_heads, dim, *(part.double() for part in angles), dim**-0.5, rotated)
    return TritonOps(made, EPS), TorchOps(wide, EPS)


def close(actual, expected):
    limit = LIMITS[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit)


@every_dtype
@pytest.mark.parametrize("size", [16, 100, 896])
def test_norms(size, dtype):
    ops, plain = both(dtype)
    x, added, weight = (random(*shape).to(dtype) for shape in ((ROWS, size), (ROWS, size), (size,)))
    close(ops.norm(x, None, weight)[1], plain.norm(x.double(), None, weight.double())[1])
    total, normed = ops.norm(x.clone(), added, weight)
    close(total, x.double() + added.double())
    close(normed, plain.norm(total.double(), None, weight.double())[1])


@every_dtype
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"), [(3, 1, 24, 24), (4, 2, 64, 32), (7, 7, 16, 16), (3, 1, 24, 4)]
)
def test_rotation(heads, kv_heads, dim, rotated, normed, dtype):
    ops, plain = both(dtype, heads, kv_heads, dim, rotated)
    qkv = random(ROWS, (heads + 2 * kv_heads) * dim, seed=3).to(dtype)
    norm = random(heads + kv_heads, dim, seed=4).to(dtype) if normed else None
    positions = torch.tensor([0, 49, 7, 7, 31], device=DEVICE)
    expected = plain.rotate(qkv.double(), positions, None if norm is None else norm.double())
    for part, wanted in zip(ops.rotate(qkv, positions, norm), expected, strict=True):
        assert part.dtype == dtype
        close(part, wanted)


@every_dtype
@pytest.mark.parametrize("size", [48, 1024, 1500])
def test_gate(size, dtype):
    ops, plain = both(dtype)
    gate_up = 3 * random(ROWS, 2 * size).to(dtype)
    close(ops.gate(gate_up), plain.gate(gate_up.double()))
