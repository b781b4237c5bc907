import numpy as np
import pytest
import torch

from tandem.engines.rollout.native.cache import (
    KVCache,
    LayerShape,
    Prefill,
    Span,
    area,
    bytes_per_token,
    decode_rows,
    spans,
)

CPU = torch.device("cpu")
LAYERS = (LayerShape(2, 8, 8), LayerShape(1, 4, 6))


def test_spans_cover_all_rows_and_are_wide_enough():
    rng = np.random.default_rng(0)
    for _ in range(200):
        needed = rng.integers(1, 600, size=rng.integers(1, 70))
        if rng.random() < 0.5:
            needed = np.sort(needed)[::-1].copy()
        cut = spans(needed)
        assert len(cut) <= 4
        assert [span.start for span in cut] == [0, *(span.stop for span in cut[:-1])]
        assert cut[-1].stop == len(needed)
        for span in cut:
            assert span.columns % 32 == 0
            assert span.columns >= needed[span.start : span.stop].max()
            assert span.columns - needed[span.start :].max() < 32


def test_spans_follow_falling_lengths():
    needed = np.array([300] * 4 + [100] * 3 + [20] * 5)
    assert spans(needed) == (Span(0, 4, 320), Span(4, 7, 128), Span(7, 12, 32))
    assert area(spans(needed)) == 4 * 320 + 3 * 128 + 5 * 32
    assert spans(needed[::-1]) == (Span(0, 12, 320),)


def test_decode_rows_are_few_and_enough():
    shapes = {decode_rows(n) for n in range(1, 257)}
    assert len(shapes) < 30
    for n in range(1, 257):
        assert n <= decode_rows(n) <= max(n + 15, 1)
        assert decode_rows(n) <= 2 * n


def test_bytes():
    assert bytes_per_token(LAYERS, torch.bfloat16) == 2 * (2 * 16 + 1 * 10)
    cache = KVCache(LAYERS, 5, torch.float32, CPU)
    cache.reserve(33)
    assert cache.bytes == sum(t.numel() * 4 for t in (*cache.keys, *cache.values)) == 5 * 64 * 4 * 42


def reference_attention(query_GD, keys_TD, values_TD):
    return (query_GD @ keys_TD.T).softmax(-1) @ values_TD


@pytest.mark.parametrize("window", [None, 5])
def test_attention_over_stored_written_moved_and_resized_rows(window):
    """Four sequences go through prefill, decode, a move and a resize; attention at each step equals the
    plain one over a copy of each sequence's keys and values."""
    torch.manual_seed(0)
    lengths = [3, 70, 12, 12]
    prompts = [
        [(torch.randn(n, s.kv_heads, s.key_dim), torch.randn(n, s.kv_heads, s.value_dim)) for s in LAYERS]
        for n in lengths
    ]
    width = max(lengths)

    def padded(layer, part):
        return torch.stack(
            [
                torch.cat((p[layer][part], torch.randn(width - n, *p[layer][part].shape[1:])))
                for p, n in zip(prompts, lengths, strict=True)
            ]
        ).transpose(1, 2)

    prefill = Prefill([padded(i, 0) for i in range(2)], [padded(i, 1) for i in range(2)], torch.zeros(4, 1))
    cache = KVCache(LAYERS, 6, torch.float32, CPU)
    rows = [1, 0, 2, 3]  # row of each prompt; row 4 only rounds up
    cache.store(prefill, torch.arange(4), torch.tensor(rows), torch.tensor(lengths))
    context = np.array([70, 3, 12, 12, 12])
    held = {row: prompts[prompt] for prompt, row in enumerate(rows)}

    for step in range(60):
        plan = cache.plan(context.copy())
        for layer, shape in enumerate(LAYERS):
            key, value = (
                torch.randn(5, shape.kv_heads, shape.key_dim),
                torch.randn(5, shape.kv_heads, shape.value_dim),
            )
            query = torch.randn(5, shape.kv_heads, 3, shape.key_dim)
            cache.write(layer, plan, key, value)
            out = cache.attend(layer, plan, query, window)
            for row, sequence in held.items():
                k, v = sequence[layer]
                k, v = torch.cat((k, key[row][None])), torch.cat((v, value[row][None]))
                sequence[layer] = (k, v)
                seen = slice(None) if window is None else slice(-window, None)
                for head in range(shape.kv_heads):
                    expected = reference_attention(query[row, head], k[seen, head], v[seen, head])
                    torch.testing.assert_close(out[row, head], expected, atol=1e-5, rtol=1e-5)
        context += 1
        if step == 20:  # rows 0 and 2 change places
            cache.move(torch.tensor([2, 0]), torch.tensor([0, 2]), int(context.max()))
            held[0], held[2] = held[2], held[0]
            context[[0, 2]] = context[[2, 0]]
        if step == 40:
            cache = cache.resized(9)
    assert cache.rows == 9
    assert cache.columns >= 130
