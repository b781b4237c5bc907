"""Estimators of KL(policy || reference) per token, from the log-probs of the sampled tokens.

x = log_probs - ref_log_probs at a token that the policy drew. A name that ends with "+", such as k3+, has the
value of the estimator and the gradient of k2; see `straight_through`.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.registry import register_kl


@register_kl("k1", "kl")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL by the log-ratio: unbiased, high variance, negative at many tokens.

    Equation (x = log_probs - ref_log_probs):

        k1_t = x_t

    When to use: in the reward (kl_penalty), where k1 is the standard. As a loss use only k1+, because the
        gradient of k1 itself has mean 0 on the policy's own samples.
    Watch: `actor/kl_in_reward` is the mean that the adaptive coefficient controls; `actor/kl` is the mean as
        a loss.
    Cost: one forward pass of the reference.

    Returns:
        (N) nats.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    return log_probs - ref_log_probs


@register_kl("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the absolute log-ratio, which is a distance and not an estimate of the KL.

    Equation (x = log_probs - ref_log_probs):

        abs_t = |x_t|

    When to use: in the reward, to keep the policy near the reference in both directions at every token.
    Watch: `actor/kl` is well above the value of k3; near the reference it shrinks linearly, not
        quadratically.
    Cost: one forward pass of the reference.

    Returns:
        (N) nats, >= 0.

    Source: the size of the penalty of Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, eq. 2.
    """
    return (log_probs - ref_log_probs).abs()


@register_kl("k2", "mse")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL by half the squared log-ratio: biased, low variance, never negative.

    Equation (x = log_probs - ref_log_probs):

        k2_t = x_t**2 / 2

    When to use: as a loss, because the mean of its gradient on the policy's own samples is the gradient of
        the KL.
    Watch: `actor/kl`, which is larger than the KL if the policies are far apart.
    Cost: one forward pass of the reference.

    Returns:
        (N) nats squared, >= 0.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    return 0.5 * (log_probs - ref_log_probs).square()


@register_kl("k3", "low_var_kl")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate the KL by the log-ratio with a control variate: unbiased, low variance, never negative.

    Equation (x = log_probs - ref_log_probs, clamped to [-20, 20]; the result is clamped to at most 10):

        k3_t = exp(-x_t) - 1 + x_t

    When to use: as a loss, as in GRPO. Its value is a good measure of the KL, but its gradient is that of the
        KL in the other direction. k3+ has the same value and the gradient of the KL.
    Watch: `actor/kl`; tokens that are far more likely under the reference than under the policy count at most
        10.
    Cost: one forward pass of the reference.

    Returns:
        (N) nats, >= 0.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; Shao et al. 2024 (GRPO),
        https://arxiv.org/abs/2402.03300, eq. 4.
    """
    bounded = (log_probs - ref_log_probs).clamp(-20, 20)
    return (torch.expm1(-bounded) + bounded).clamp(max=10)


def straight_through(values: Tensor, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the given estimates with the gradient of k2.

    The gradient of k2 is x d log_probs. On the policy's own samples its mean is the gradient of the KL,
    whatever the estimates are.

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
