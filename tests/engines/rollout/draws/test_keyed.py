import numpy as np
from scipy import stats

from tandem.engines.rollout.draws.keyed import first_position, row_key, uniforms
from tandem.protocol import Request, SamplingParams


def request(uid="a", sample=0, seed=0, prompt=3, first=-1):
    return Request(uid, sample, np.ones(prompt, dtype=np.int64), SamplingParams(seed=seed), first)


def splitmix64(state, count):
    """Run the published generator with Python's integers."""
    mask, out = (1 << 64) - 1, []
    for _ in range(count):
        z = state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def test_uniforms_are_splitmix64s_stream():
    # The first outputs of splitmix64 for seed 1234567, as published with its reference implementation.
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    keys = np.full(3, 1234567, dtype=np.uint64)
    expected = [(z >> 11) / 2**53 for z in splitmix64(1234567, 3)]
    assert uniforms(keys, np.array([1, 2, 3])).tolist() == expected


def test_every_part_of_the_key_counts():
    parts = [("a", 0, 0), ("b", 0, 0), ("a", 1, 0), ("a", 0, 1), ("a", 1, 1)]
    assert len({row_key(request(*each)) for each in parts}) == 5
    assert row_key(request("a", 0, -1)) == row_key(request("a", 0, -1))
    assert (first_position(request(prompt=5)), first_position(request(prompt=5, first=2))) == (5, 2)


def test_numbers_are_uniform_and_independent_between_neighbours():
    keys = np.array([row_key(request(f"p{i}", j)) for i in range(100) for j in range(8)], dtype=np.uint64)
    table = np.stack([uniforms(keys, np.full(len(keys), t)) for t in range(250)], 1)
    assert table.min() >= 0 and table.max() < 1
    counts = np.histogram(table, bins=1000, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-3
    for one, other in ((table[:, :-1], table[:, 1:]), (table[:-1], table[1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(table.size)
