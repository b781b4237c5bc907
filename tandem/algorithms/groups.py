"""Statistics over the samples of one prompt. Shapes: B sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape, segment_sum


class GroupStatistics(NamedTuple):
    """The statistics of each sequence's group; all (B).

    Attributes:
        mean: zero for a group of one.
        std: unbiased; one for a group of one.
        size: int64.
    """

    mean: Tensor
    std: Tensor
    size: Tensor


def _sorted(group: Tensor) -> tuple[Tensor, Tensor]:
    """Sort sequences by group.

    Returns:
        (B) int64, the sequences of one group after those of another, in their own order; (G+1) int64, where
        each group starts in that order.
    """
    sizes = group.bincount()
    return group.argsort(stable=True), torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """(B): the sum over each sequence's group, the same bits every time.

    Args:
        values: (B) float64.
        group: (B) int64 from 0, in any order.
    """
    require_same_shape(values, group)
    if values.device.type == "cpu":
        return group.bincount(weights=values)[group]
    order, offsets = _sorted(group)  # for on other devices weighted counts come to other bits each time
    return segment_sum(values[order], offsets)[group]


def best_two(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best sequence of every group that has members, and the score of the second best.

    Args:
        scores: (B).
        group: (B) int64 from 0, in any order.

    Returns:
        int64, which sequence has the greatest score, the first of several; the score next to it, zero where
        the best is alone.
    """
    require_same_shape(scores, group)
    falling = scores.argsort(descending=True, stable=True)
    order, offsets = _sorted(group[falling])
    order, sizes = falling[order], offsets.diff()
    first = offsets[:-1][sizes > 0]
    second = scores[order[(first + 1).clamp(max=max(len(order) - 1, 0))]]
    return order[first], second.masked_fill(sizes[sizes > 0] == 1, 0)


def group_mean(scores: Tensor, group: Tensor) -> Tensor:
    """(B): `GroupStatistics.mean` alone, of what `group_statistics` takes."""
    size = group.bincount()[group]
    return (group_sum(scores, group) / size).masked_fill(size == 1, 0.0)


def group_statistics(scores: Tensor, group: Tensor) -> GroupStatistics:
    """Mean, standard deviation and size of every group, the same bits every time.

    Args:
        scores: (B) float64, so that equal scores deviate from their mean by exactly zero.
        group: (B) int64 from 0, in any order.
    """
    require_same_shape(scores, group)
    assert scores.dtype == torch.float64, scores.dtype
    size = group.bincount()[group]
    means = group_sum(scores, group) / size
    variances = group_sum((scores - means).square(), group) / (size - 1).clamp(min=1)
    alone = size == 1
    return GroupStatistics(means.masked_fill(alone, 0.0), variances.sqrt().masked_fill(alone, 1.0), size)
