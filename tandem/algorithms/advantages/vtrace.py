"""V-trace: values and advantages of the current policy, estimated from samples of an older policy.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

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
    """Compute V-trace value targets for the response tokens and the matching advantages.

    Equation (w_t = exp(old_log_probs - rollout_log_probs), the exponent clamped to [-20, 20]; t+1 is the next
    response token; V and v are 0 after the last response token):

        rho_t = min(rho_bar, w_t)
        c_t = lam * min(c_bar, w_t)
        v_t = V_t + rho_t * (r_t + gamma * V_{t+1} - V_t) + gamma * c_t * (v_{t+1} - V_{t+1})
        A_t = rho_t * (r_t + gamma * v_{t+1} - V_t)

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        values: (N) fp32, the critic's value before each token.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        rollout_log_probs: (N) fp32, nats, of the engine that sampled.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        gamma: discount, in [0, 1].
        lam: decay of the trace, in [0, 1]; 0 relies on the critic's values only, 1 on the rewards only.
        rho_bar: bound of the weight of a token's error; determines the limit to which the values converge.
        c_bar: bound of the weights along the trace, at most rho_bar; decides how fast they converge.

    Returns:
        The advantages A (N), not whitened, and the returns v (N).

    Raises:
        ConfigError: c_bar is above rho_bar, or outside [0, 1], the range in which long traces stay finite.

    When to use: samples from an older policy or another engine, with a critic. The advantages already contain
        the importance weight, so add no other rollout correction.
    Watch: `rollout/log_prob_diff_mean` is the distance of the samples from the policy;
        `critic/explained_variance` shows whether you can trust the critic.
    Cost: a critic, and log-probs recomputed before the updates.
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
