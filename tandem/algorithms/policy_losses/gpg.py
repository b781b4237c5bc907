"""Group policy gradient."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.policy_losses.reinforce import reinforce
from tandem.algorithms.registry import register_policy_loss


@register_policy_loss("gpg")
def gpg(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient over the tokens of a group: no ratio, no clip, no reference.

    Equation:

        l = -A * log_probs

    A token's loss is that of `reinforce`; what makes it GPG are its advantages (the estimator gpg) and the
    mean over all tokens.

    When to use: with algorithm.adv_estimator=gpg and one update per batch, as the simplest thing that learns
    from groups. Usual aggregation: token-mean.
    Watch: `actor/ppo_kl` how far the policy has moved since the samples were written: 0 with one update per
    batch; what it is with more is not corrected.
    Cost: nothing.

    Args:
        old_log_probs: only the metric reads them.

    Returns:
        (N) losses, and per token ppo_kl (old_log_probs - log_probs).

    Source: Chu et al. 2025, https://arxiv.org/abs/2504.02546, section 2.
    """
    return reinforce(log_probs, old_log_probs, advantages)
