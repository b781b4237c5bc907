"""The policy loss of bypass mode, in which the rollout's log-probs serve as the old log-probs.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.masked import require_same_shape
from tandem.algorithms.policy_losses.vanilla import vanilla
from tandem.algorithms.registry import register_policy_loss
from tandem.errors import ConfigError


@register_policy_loss("bypass_mode")
def bypass_mode(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    loss_type: str = "ppo_clip",
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss or the REINFORCE loss against the policy that sampled.

    Equation (for REINFORCE, the worker multiplies the loss by the detached importance weight pi / pi_rollout;
    for PPO, the clipped ratio already is this weight):

        l = -A * log pi                            (loss_type reinforce)
        l = vanilla(log pi, log pi_rollout, A)     (loss_type ppo_clip)

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, from the engine that sampled.
        advantages: (N) fp32.
        loss_type: "ppo_clip" or "reinforce".
        clip_ratio_low: for ppo_clip, see `vanilla`.
        clip_ratio_high: for ppo_clip, see `vanilla`.
        clip_ratio_c: for ppo_clip, see `vanilla`.

    Returns:
        (N) losses, and the per-token metric ppo_kl; with ppo_clip also the other metrics of `vanilla`.

    Raises:
        ConfigError: the loss_type is unknown.

    When to use: if you want to avoid the forward pass that recomputes old log-probs, and the rollout's
        log-probs are accurate or corrected.
    Watch: `rollout_corr/kl` is the distance from the policy that sampled, which grows with each update of the
        batch; `actor/clip_fraction` is the share of tokens that the clip stops.
    Cost: nothing; it saves one forward pass of the policy per batch.
    Source: ppo_clip, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; reinforce with weights,
        Liu et al. 2025, https://richardli.xyz/rl-collapse.
    """
    if loss_type == "ppo_clip":
        bounds = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high}
        return vanilla(log_probs, old_log_probs, advantages, **bounds, clip_ratio_c=clip_ratio_c)
    if loss_type != "reinforce":
        raise ConfigError("unknown value", field="loss_type", got=loss_type, expected="ppo_clip or reinforce")
    require_same_shape(log_probs, advantages)
    return -advantages * log_probs, {"ppo_kl": (old_log_probs - log_probs).detach()}
