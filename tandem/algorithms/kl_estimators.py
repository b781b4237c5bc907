"""Estimates of KL(policy || reference) per token, from the log-probs of the tokens sampled.

Written x = log_probs - ref_log_probs at a token that the policy drew. A name with a + at its end, such as
k3+, has the value of the estimator and the gradient of k2; see `straight_through`.

Shapes: N tokens of all sequences together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.registry import register_kl


@register_kl("k1", "kl")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The log-ratio: unbiased, of great variance, negative at many tokens.

    Equation (x = log_probs - ref_log_probs):

        k1_t = x_t

    When to use: in the reward (kl_penalty), where it is the standard; as a loss only as k1+, for the
    gradient of k1 itself has mean zero on the policy's own samples.
    Watch: `actor/kl_in_reward` the mean that the adaptive coefficient steers; `actor/kl` as a loss.
    Cost: one forward of the reference.

    Returns:
        (N) nats.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    return log_probs - ref_log_probs


@register_kl("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The size of the log-ratio: a distance, not an estimate of the KL.

    Equation (x = log_probs - ref_log_probs):

        abs_t = |x_t|

    When to use: in the reward, to hold the policy at the reference in both directions at every token.
    Watch: `actor/kl` well above what k3 would show; it does not go to zero with the square.
    Cost: one forward of the reference.

    Returns:
        (N) nats, not negative.

    Source: the size of the penalty of Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, eq. 2.
    """
    return (log_probs - ref_log_probs).abs()


@register_kl("k2", "mse")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Half the squared log-ratio: biased, of small variance, never negative.

    Equation (x = log_probs - ref_log_probs):

        k2_t = x_t**2 / 2

    When to use: as a loss: the mean of its gradient on the policy's own samples is the gradient of the KL.
    Watch: `actor/kl`; it overstates the KL where the policies are far apart.
    Cost: one forward of the reference.

    Returns:
        (N) nats squared, not negative.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    return 0.5 * (log_probs - ref_log_probs).square()


@register_kl("k3", "low_var_kl")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The log-ratio with its control variate: unbiased, of small variance, never negative.

    Equation (x = log_probs - ref_log_probs, clamped to [-20, 20], the result to 10):

        k3_t = exp(-x_t) - 1 + x_t

    When to use: as a loss, as in GRPO; its value is a good measure of the KL. Its gradient is that of the
    KL in the other direction; k3+ keeps the value and takes the gradient of the KL.
    Watch: `actor/kl`; tokens that the reference finds far likelier than the policy are cut at 10.
    Cost: one forward of the reference.

    Returns:
        (N) nats, not negative.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; Shao et al. 2024 (GRPO),
    https://arxiv.org/abs/2402.03300, eq. 4.
    """
    bounded = (log_probs - ref_log_probs).clamp(-20, 20)
    return (torch.expm1(-bounded) + bounded).clamp(max=10)


def straight_through(values: Tensor, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimates with the gradient of k2, x d log_probs, whose mean on the policy's own samples is the
    gradient of the KL, whatever the estimates are.

    Args:
        values: (N) the estimates.
        log_probs: (N) nats; the gradient flows through it.
        ref_log_probs: (N) nats.

    Returns:
        (N), equal to `values`.

    Source: Tang and Munos 2025, https://arxiv.org/abs/2506.09477.
    """
    slope = k2(log_probs, ref_log_probs)
    return values.detach() + (slope - slope.detach())
