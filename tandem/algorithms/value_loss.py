"""The loss of the critic.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the squared error per token, clipped so that values do not move far from the old values.

        v_clip = clip(v, v_old - c, v_old + c)
        l = max((v - R)**2, (v_clip - R)**2) / 2

    Args:
        values: (N), carries the gradient.
        old_values: (N), before this batch's updates.
        returns: (N).
        cliprange_value: c, > 0.

    Returns:
        (N) losses, and {"clip_fraction": (N)}, which is 1 where the clipped error is the larger.

    When to use: with every estimator that needs a critic; there is no other value loss.
    Watch: `critic/clip_fraction` near 1 means that the clip stops the critic before it reaches the returns;
        `critic/explained_variance` should rise from 0 towards 1; `critic/loss` should fall.
    Cost: a forward and a backward pass of the critic for each of its mini-batches.
    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, section 5; the clipping is that of the
        authors' code, described in Engstrom et al. 2020, https://arxiv.org/abs/2005.12729.
    """
    require_same_shape(values, old_values, returns)
    clipped_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    plain, clipped = (values - returns).square(), (clipped_values - returns).square()
    return 0.5 * torch.maximum(plain, clipped), {"clip_fraction": (clipped > plain).to(values.dtype)}
