"""The policy loss of group policy gradient (GPG).

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.policy_losses.reinforce import reinforce
from tandem.algorithms.registry import register_policy_loss


@register_policy_loss("gpg")
def gpg(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the plain policy gradient loss: no ratio, no clip, no reference.

    Equation:

        l = -A * log_probs

    The loss per token is the same as in `reinforce`. GPG differs in its advantages (the estimator gpg) and in
    taking the mean over all tokens.

    When to use: with algorithm.adv_estimator=gpg and one update per batch, as the simplest method that learns
        from groups. Usual aggregation: token-mean.
    Watch: `actor/ppo_kl` is how far the policy has moved since the samples were written: 0 with one update
        per batch. With more updates the loss does not correct for this distance.
    Cost: nothing.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats; used only for the metric.
        advantages: (N) fp32.

    Returns:
        (N) losses, and the per-token metric ppo_kl (old_log_probs - log_probs).

    Source: Chu et al. 2025, https://arxiv.org/abs/2504.02546, section 2.
    """
    return reinforce(log_probs, old_log_probs, advantages)
