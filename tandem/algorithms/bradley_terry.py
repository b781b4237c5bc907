"""The loss of a reward model that learns from preferences. Shapes: P pairs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from tandem.algorithms.masked import require_same_shape


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor, *, center_coefficient: float = 0.0
) -> Tensor:
    """The surprise, under the Bradley-Terry model of preferences, that the chosen answer won.

        l = -log(sigmoid(r_chosen - r_rejected - margin)) + c * (r_chosen + r_rejected)**2

    The first term leaves open what number is added to all rewards; the second keeps them around zero.

    Args:
        chosen, rejected: (P) rewards, carry the gradient.
        margin: (P), by how much the chosen answer is to be better; 0 where nobody said.
        center_coefficient: c, >= 0.

    Returns:
        (P) losses, nats.

    When to use: `tandem rm`, which learns a reward model from preferences.
    Watch: `rm/accuracy` and `val/accuracy`, the share of pairs in the right order; `rm/margin` how far apart
    they are; `rm/reward_chosen` drifts away from zero where c is 0.
    Cost: two sequences for each pair.
    Source: Bradley and Terry 1952, Biometrika 39; for language models Ouyang et al. 2022,
    https://arxiv.org/abs/2203.02155, equation 1; the margin: Touvron et al. 2023,
    https://arxiv.org/abs/2307.09288, equation 2; the second term: Eisenstein et al. 2023,
    https://arxiv.org/abs/2312.09244.
    """
    require_same_shape(chosen, rejected, margin)
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + center_coefficient * (chosen + rejected).square()
