"""Statistics over the samples of one prompt (a group).

Shapes: B is the number of sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape, segment_sum


class GroupStatistics(NamedTuple):
    """The statistics of each sequence's group, each of shape (B).

    Attributes:
        mean: the group's mean; 0 for a group with a single sequence.
        std: the unbiased standard deviation; 1 for a group with a single sequence.
        size: int64, number of sequences in the group.
    """

    mean: Tensor
    std: Tensor
    size: Tensor


def _sorted(group: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the sequences by group.

    Returns:
        (B) int64, the indices of the sequences, group after group, in their original order within a group;
        (G+1) int64, the start of each of the G groups among these indices.
    """
    sizes = group.bincount()
    return group.argsort(stable=True), torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Return the sum over each sequence's group, (B), with identical bits on every call.

    Args:
        values: (B) float64.
        group: (B) int64, group index from 0, in any order.
    """
    require_same_shape(values, group)
    if values.device.type == "cpu":
        return group.bincount(weights=values)[group]
    order, offsets = _sorted(group)  # on other devices, weighted bincount is not deterministic
    return segment_sum(values[order], offsets)[group]


def best_two(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best sequence of every non-empty group, and the score of the second best.

    Args:
        scores: (B).
        group: (B) int64, group index from 0, in any order.

    Returns:
        int64, the index of the sequence with the highest score (the first such sequence if scores are equal);
        the second highest score, which is 0 if the group has a single sequence.
    """
    require_same_shape(scores, group)
    falling = scores.argsort(descending=True, stable=True)
    order, offsets = _sorted(group[falling])
    order, sizes = falling[order], offsets.diff()
    first = offsets[:-1][sizes > 0]
    second = scores[order[(first + 1).clamp(max=max(len(order) - 1, 0))]]
    return order[first], second.masked_fill(sizes[sizes > 0] == 1, 0)


def group_mean(scores: Tensor, group: Tensor) -> Tensor:
    """Return only `GroupStatistics.mean`, (B); takes the arguments of `group_statistics`."""
    size = group.bincount()[group]
    return (group_sum(scores, group) / size).masked_fill(size == 1, 0.0)


def group_statistics(scores: Tensor, group: Tensor) -> GroupStatistics:
    """Return the mean, standard deviation and size of every group, with identical bits on every call.

    Args:
        scores: (B) float64, so that equal scores deviate from their mean by exactly 0.
        group: (B) int64, group index from 0, in any order.
    """
    require_same_shape(scores, group)
    assert scores.dtype == torch.float64, scores.dtype
    size = group.bincount()[group]
    means = group_sum(scores, group) / size
    variances = group_sum((scores - means).square(), group) / (size - 1).clamp(min=1)
    alone = size == 1
    return GroupStatistics(means.masked_fill(alone, 0.0), variances.sqrt().masked_fill(alone, 1.0), size)
