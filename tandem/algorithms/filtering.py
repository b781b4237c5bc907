"""Which prompts teach something: those whose responses are not all worth the same."""

from __future__ import annotations

import torch
from torch import Tensor


def groups_with_spread(values: Tensor, n: int) -> Tensor:
    """Whether the responses to each prompt differ; (B / n) bool.

    Equation (R_i the values of a prompt's responses):

        kept = max_i R_i > min_i R_i

    Where all are equal, advantages relative to the group are zero.

    When to use: dynamic sampling, with estimators that compare the responses to a prompt.
    Watch: `sampling/dropped_groups` the share of prompts that teach nothing; near one, the data are too easy
        or too hard.
    Cost: further rollouts until a batch is full.
    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.2, eq. 11.

    Args:
        values: (B) floats, prompt by prompt, n each.
        n: responses per prompt.
    """
    assert values.ndim == 1, values.shape
    assert len(values) % n == 0, (len(values), n)
    groups = values.view(-1, n)
    if not len(groups):
        return torch.zeros(0, dtype=torch.bool)
    return groups.amax(1) > groups.amin(1)
