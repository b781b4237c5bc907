"""Direct reward optimisation (DRO), applied per token.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.masked import require_same_shape
from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import require_positive


@register_policy_loss("dro")
def dro(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, dro_beta: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy gradient loss with a quadratic penalty on the log-ratio.

    There is no ratio that could explode.

    Equation (d = log_probs - old_log_probs):

        l = -(A * log_probs - beta / 2 * d**2)

    As a function of log_probs, the loss is minimal at d = A / beta, the solution of KL-regularised
    reinforcement learning. The paper squares the sum of a sequence's log-ratios, uses the reference policy
    instead of the old policy, and uses the reward minus a learned value as A. This is the per-token, per-step
    form that is used in practice.

    When to use: samples that are several updates old or come from another policy. The penalty pulls the
        policy back to the policy that wrote the samples, so no clip is needed. dro_beta has no default,
        because no value fits every task: a larger value keeps the policy closer, and a token settles at A /
        dro_beta nats. Usual aggregation: token-mean.
    Watch: `actor/penalty` is the mean of beta / 2 * d**2; `actor/ppo_kl` is how far the policy has moved
        since the samples were written.
    Cost: nothing.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        dro_beta: beta, > 0; must be set.

    Returns:
        (N) losses, and the per-token metrics penalty and ppo_kl (-d).

    Raises:
        ConfigError: dro_beta is not positive.

    Source: Richemond et al. 2024, https://arxiv.org/abs/2405.19107 (the policy's part of DRO-V).
    """
    require_same_shape(log_probs, old_log_probs, advantages)
    require_positive("dro_beta", dro_beta)
    difference = log_probs - old_log_probs
    penalty = 0.5 * dro_beta * difference.square()
    return penalty - advantages * log_probs, {"penalty": penalty.detach(), "ppo_kl": -difference.detach()}
