"""Direct reward optimisation, token by token."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.masked import require_same_shape
from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import require_positive


@register_policy_loss("dro")
def dro(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, dro_beta: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient with a quadratic penalty on the log-ratio: no ratio that could explode.

    Equation (d = log_probs - old_log_probs):

        l = -(A * log_probs - beta / 2 * d**2)

    Its minimum by log_probs is at d = A / beta, the solution of KL-regularised reinforcement learning.
    The paper has the sum of a sequence's log-ratios inside the square, the reference policy where the old
    one stands here, and the reward less a learned value as A; this is the form by tokens and by steps that
    is in use.

    When to use: samples that are several updates old or come from another policy; the pull back to the
    policy that wrote them needs no clip. dro_beta has no default that would fit every task: larger holds the
    policy closer; A / dro_beta nats is where a token comes to rest. Usual aggregation: token-mean.
    Watch: `actor/penalty` the mean of beta / 2 * d**2; `actor/ppo_kl` how far the policy has moved since the
    samples were written.
    Cost: nothing.

    Args:
        dro_beta: beta, > 0; it must be given.

    Returns:
        (N) losses, and per token: penalty, ppo_kl (-d).

    Raises:
        ConfigError: dro_beta is not positive.

    Source: Richemond et al. 2024, https://arxiv.org/abs/2405.19107 (the policy's part of DRO-V).
    """
    require_same_shape(log_probs, old_log_probs, advantages)
    require_positive("dro_beta", dro_beta)
    difference = log_probs - old_log_probs
    penalty = 0.5 * dro_beta * difference.square()
    return penalty - advantages * log_probs, {"penalty": penalty.detach(), "ppo_kl": -difference.detach()}
