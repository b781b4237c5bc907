"""Random ragged batches, and what the references in float64 share."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**31)
Columns = dict[str, torch.Tensor]


def batches(examples, longest=60, most=8, **drawn):
    """Run a test on so many random batches: it gets `lengths`, a `seed` and the values that are `drawn`."""
    lengths = st.lists(st.integers(0, longest), min_size=1, max_size=most)
    values = {"lengths": lengths, "seed": SEEDS} | drawn
    return lambda test: settings(deadline=None, max_examples=examples)(given(**values)(test))


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def rows(columns: Columns) -> list[slice]:
    cuts = columns["offsets"].tolist()
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def responses(columns: Columns) -> list[list[int]]:
    """Return the indices of each sequence's response tokens."""
    mask = columns["response_mask"].tolist()
    return [[t for t in range(row.start, row.stop) if mask[t]] for row in rows(columns)]


def ragged_columns(lengths, seed, dtype=torch.float32, holes=0.2) -> Columns:
    """Make random columns: some responses have holes or are empty. What no algorithm may read is NaN."""
    generator = torch.Generator().manual_seed(seed)
    offsets, count = offsets_of(lengths), len(lengths)
    total = int(offsets[-1])

    def normal(nan_outside=False):
        values = torch.randn(total, generator=generator, dtype=torch.float64).to(dtype)
        return torch.where(mask, values, torch.nan) if nan_outside else values

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)

    mask = torch.rand(total, generator=generator) >= holes
    for row in rows({"offsets": offsets}):
        prompt = int(torch.randint(0, 4, (), generator=generator))
        empty = torch.rand((), generator=generator) < 0.1
        mask[row.start : row.stop if empty else row.start + prompt] = False
    return {
        "response_mask": mask,
        "offsets": offsets,
        "token_level_rewards": torch.where(mask, normal(), 0),
        "values": normal(nan_outside=True),
        "log_probs": -normal().abs(),
        "old_log_probs": -normal().abs(),
        "advantages": torch.where(mask, normal(), 0),
        "group": torch.randint(0, max(1, (count + 2) // 3), (count,), generator=generator),
        "rollout_log_probs": -normal(nan_outside=True).abs(),
        "sum_pi_squared": normal(nan_outside=True).abs().clamp(max=1),
        "rollout_is_weights": normal(nan_outside=True).abs().clamp(max=2),
        "reward_baselines": uniform(count),
        "reward_components": uniform(count, 3),
    }


def chosen(columns: Columns, order: list[int]) -> Columns:
    """Return the sequences with the given indices, in that order."""
    spans = [torch.arange(row.start, row.stop) for row in rows(columns)]
    tokens = torch.cat([spans[i] for i in order])
    per_sequence = ("group", "reward_baselines", "reward_components")
    out = {
        name: column.detach()[order if name in per_sequence else tokens]
        for name, column in columns.items()
        if name != "offsets"
    }
    return out | {"offsets": offsets_of([len(spans[i]) for i in order])}


def whitened(values, mask):
    """Whiten the masked values in float64, with 0 elsewhere."""
    inside = values.double()[mask]
    count = len(inside)
    mean = sum(inside.tolist()) / max(count, 1)
    variance = sum((x - mean) ** 2 for x in inside.tolist()) / max(count - 1, 1)
    out = torch.zeros_like(values, dtype=torch.float64)
    out[mask] = (inside - mean) / (variance + 1e-8) ** 0.5
    return out
