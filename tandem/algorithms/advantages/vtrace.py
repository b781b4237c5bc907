"""V-trace: values and advantages of the policy being trained, from samples of an older one."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.registry import Advantages, register_advantage
from tandem.algorithms.responses import Responses
from tandem.algorithms.scan import following, last_indices, longest_of, reverse_linear_scan_
from tandem.errors import ConfigError


@register_advantage("vtrace")
def vtrace(
    token_level_rewards: Tensor,
    values: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Advantages:
    """V-trace targets over the response tokens of each sequence, and the advantages that go with them.

    Equation (w = exp(old_log_probs - rollout_log_probs), the exponent clamped to [-20, 20]; t+1 is the next
    response token; V and v are zero after the last one):

        rho_t = min(rho_bar, w_t)
        c_t = lam * min(c_bar, w_t)
        v_t = V_t + rho_t * (r_t + gamma * V_{t+1} - V_t) + gamma * c_t * (v_{t+1} - V_{t+1})
        A_t = rho_t * (r_t + gamma * v_{t+1} - V_t)

    Args:
        gamma, lam: discount and decay of the trace, in [0, 1]; lam 0 trusts the critic, 1 the rewards.
        rho_bar: bound of the weight of a token's own surprise; it decides what the values converge to.
        c_bar: bound of the weights along the trace, at most rho_bar; it decides how fast.

    Returns:
        The advantages A, not whitened; returns are v.

    Raises:
        ConfigError: c_bar is not in [0, 1], where long traces stay finite, or is above rho_bar.

    When to use: samples of an older policy or of another engine, with a critic. The advantages hold the
        importance weight already: no further rollout correction.
    Watch: `rollout/log_prob_diff_mean` tells how far the samples are from the policy;
        `critic/explained_variance` whether the critic can be trusted with it.
    Cost: a critic; log-probs computed again before the updates.
    Source: Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, eq. 1 and section 4.2; remark 2 for lam.
    """
    if not 0 <= c_bar <= min(1, rho_bar):
        raise ConfigError("out of range", field="c_bar", got=c_bar, expected=f"0 to {min(1, rho_bar):g}")
    tokens = Responses.of(response_mask, offsets)
    predicted = tokens.take(values)
    surprise = tokens.take(token_level_rewards) - predicted
    weights = (tokens.take(old_log_probs) - tokens.take(rollout_log_probs)).clamp_(-20, 20).exp_()
    rho, trace = weights.clamp(max=rho_bar), weights.clamp_(max=c_bar).mul_(gamma * lam)
    trace[last_indices(tokens.offsets)] = 0
    corrections = rho * (surprise + gamma * following(predicted, tokens.offsets))
    targets = reverse_linear_scan_(corrections, trace, longest_of(tokens.offsets)).add_(predicted)
    advantages = rho * (surprise + gamma * following(targets, tokens.offsets))
    return Advantages(tokens.put(advantages), tokens.put(targets))
