"""REINFORCE: the policy gradient itself."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import log_ratio


@register_policy_loss("reinforce")
def reinforce(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The score function weighed by the advantage, without a ratio of policies.

    Equation:

        l = -A * log_probs

    When to use: one update per batch, where it has the gradient of all clipped losses and nothing to set.
    With more, those after the first use samples of an older policy as if they were the present one's.
    Usual aggregation: seq-mean-token-sum, which sums each sequence's score function as the theorem has it.
    Watch: `actor/ppo_kl` how far the policy has moved since the samples were written: 0 with one update per
    batch; what it is with more is not corrected.
    Cost: nothing.

    Args:
        old_log_probs: only the metric reads them.

    Returns:
        (N) losses, and per token ppo_kl (old_log_probs - log_probs).

    Source: Williams 1992, Machine Learning 8, 229 to 256; for language models Ahmadian et al. 2024,
    https://arxiv.org/abs/2402.14740, section 2.2.
    """
    moved = log_ratio(log_probs, old_log_probs, advantages).detach()
    return -advantages * log_probs, {"ppo_kl": -moved}
