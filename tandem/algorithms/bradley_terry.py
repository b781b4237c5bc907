"""The loss of a reward model that learns from preference pairs.

Shapes: P is the number of pairs.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from tandem.algorithms.masked import require_same_shape


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor, *, center_coefficient: float = 0.0
) -> Tensor:
    """Return the negative log-likelihood, under the Bradley-Terry model, that the chosen response wins.

        l = -log(sigmoid(r_chosen - r_rejected - margin)) + c * (r_chosen + r_rejected)**2

    The first term does not change if a constant is added to all rewards. The second term keeps the rewards
    near 0.

    Args:
        chosen: (P) rewards of the preferred responses; carry the gradient.
        rejected: (P) rewards of the other responses; carry the gradient.
        margin: (P) how much higher the chosen reward should be; 0 if the dataset gives no margin.
        center_coefficient: c, >= 0.

    Returns:
        (P) losses, nats.

    When to use: `tandem rm`, which trains a reward model on preferences.
    Watch: `rm/accuracy` and `val/accuracy` are the shares of pairs in the right order; `rm/margin` is the
        mean difference of the two rewards; `rm/reward_chosen` drifts away from 0 if c is 0.
    Cost: two sequences per pair.
    Source: Bradley and Terry 1952, Biometrika 39; for language models Ouyang et al. 2022,
        https://arxiv.org/abs/2203.02155, equation 1; the margin: Touvron et al. 2023,
        https://arxiv.org/abs/2307.09288, equation 2; the second term: Eisenstein et al. 2023,
        https://arxiv.org/abs/2312.09244.
    """
    require_same_shape(chosen, rejected, margin)
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + center_coefficient * (chosen + rejected).square()
