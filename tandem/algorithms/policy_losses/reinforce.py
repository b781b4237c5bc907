"""REINFORCE: the plain policy gradient.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import log_ratio


@register_policy_loss("reinforce")
def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-prob weighted by the advantage, without a ratio of policies.

    Equation:

        l = -A * log_probs

    When to use: one update per batch, where REINFORCE has the same gradient as all clipped losses and nothing
        to tune. With more updates, the later ones treat samples of an older policy as if they came from the
        current policy. Usual aggregation: seq-mean-token-sum, which sums over each sequence as in the policy
        gradient theorem.
    Watch: `actor/ppo_kl` is how far the policy has moved since the samples were written: 0 with one update
        per batch. With more updates the loss does not correct for this distance.
    Cost: nothing.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats; used only for the metric.
        advantages: (N) fp32.

    Returns:
        (N) losses, and the per-token metric ppo_kl (old_log_probs - log_probs).

    Source: Williams 1992, Machine Learning 8, 229 to 256; for language models Ahmadian et al. 2024,
        https://arxiv.org/abs/2402.14740, section 2.2.
    """
    moved = log_ratio(log_probs, old_log_probs, advantages).detach()
    return -advantages * log_probs, {"ppo_kl": -moved}
