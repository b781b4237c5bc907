"""Random ragged batches, and references that follow the equations in float64, token by token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Columns = dict[str, Tensor]


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64).cumsum(0)))


@pytest.fixture(scope="session")
def ragged_columns() -> Callable[..., Columns]:
    """Return a function that makes the columns of a random batch.

    Prompts have up to 3 tokens, responses have holes, and some responses are empty. Rewards, values and
    log-probs are random. Entries that no algorithm may read are NaN.
    """

    def make(
        lengths: list[int], seed: int, dtype: torch.dtype = torch.float32, holes: float = 0.2
    ) -> Columns:
        generator = torch.Generator().manual_seed(seed)
        offsets = offsets_of(lengths)
        total = int(offsets[-1])

        def normal() -> Tensor:
            return torch.randn(total, generator=generator, dtype=torch.float64).to(dtype)

        mask = torch.rand(total, generator=generator) >= holes
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            prompt = int(torch.randint(0, 4, (), generator=generator))
            empty = torch.rand((), generator=generator) < 0.1
            mask[start : stop if empty else start + prompt] = False
        return {
            "response_mask": mask,
            "offsets": offsets,
            "token_level_rewards": torch.where(mask, normal(), 0),
            "values": torch.where(mask, normal(), torch.nan),
            "log_probs": -normal().abs(),
            "old_log_probs": -normal().abs(),
            "advantages": torch.where(mask, normal(), 0),
            "group": torch.randint(0, max(1, (len(lengths) + 2) // 3), (len(lengths),), generator=generator),
            "rollout_log_probs": torch.where(mask, -normal().abs(), torch.nan),
            "sum_pi_squared": torch.where(mask, normal().abs().clamp(max=1), torch.nan),
            "rollout_is_weights": torch.where(mask, normal().abs().clamp(max=2), torch.nan),
            "reward_baselines": torch.rand(len(lengths), generator=generator, dtype=torch.float64).to(dtype),
            "reward_components": torch.rand(len(lengths), 3, generator=generator, dtype=torch.float64).to(
                dtype
            ),
        }

    return make


@pytest.fixture(scope="session")
def rows() -> Callable[[Columns], list[slice]]:
    """Return a function that gives the slice of each sequence."""
    return lambda columns: [
        slice(start, stop)
        for start, stop in zip(columns["offsets"][:-1].tolist(), columns["offsets"][1:].tolist(), strict=True)
    ]


@pytest.fixture(scope="session")
def whitened() -> Callable[[Tensor, Tensor], Tensor]:
    """Return a reference for whitening over the masked values, in float64, with 0 elsewhere."""

    def reference(values: Tensor, mask: Tensor) -> Tensor:
        inside = values.double()[mask]
        count = len(inside)
        mean = sum(inside.tolist()) / max(count, 1)
        variance = sum((x - mean) ** 2 for x in inside.tolist()) / max(count - 1, 1)
        out = torch.zeros_like(values, dtype=torch.float64)
        out[mask] = (inside - mean) / (variance + 1e-8) ** 0.5
        return out

    return reference
