"""Statistics over the samples of one prompt. Shapes: B sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.masked import segment_sum


class GroupStatistics(NamedTuple):
    """Of each sequence's group; all (B).

    Attributes:
        mean: zero for a group of one.
        std: unbiased; one for a group of one.
        size: int64.
    """

    mean: Tensor
    std: Tensor
    size: Tensor


def group_statistics(scores: Tensor, group: Tensor) -> GroupStatistics:
    """Mean, standard deviation and size of every group.

    Sorts by group and sums runs, which unlike scattered addition gives the same bits every time.

    Args:
        scores: (B) float64, so that equal scores deviate from their mean by exactly zero.
        group: (B) int64 from 0, in any order.
    """
    assert scores.shape == group.shape, (scores.shape, group.shape)
    assert scores.dtype == torch.float64, scores.dtype
    order = group.argsort(stable=True)
    sizes = group.bincount()
    offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    means = (segment_sum(scores[order], offsets) / sizes)[group]
    squares = (scores - means).square()
    variances = segment_sum(squares[order], offsets) / (sizes - 1).clamp(min=1)
    size = sizes[group]
    alone = size == 1
    return GroupStatistics(
        means.masked_fill(alone, 0.0), variances.sqrt()[group].masked_fill(alone, 1.0), size
    )
