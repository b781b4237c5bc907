"""The policy loss of a run in which the rollout's log-probs stand for the old ones."""

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
    """PPO's clipped surrogate, or REINFORCE, against the policy that sampled.

    Equation (the worker multiplies REINFORCE by the importance weight of pi / pi_rollout, detached; the
    clipped ratio is that weight already):

        l = -A * log pi                            (loss_type reinforce)
        l = vanilla(log pi, log pi_rollout, A)     (loss_type ppo_clip)

    Args:
        old_log_probs: of the engine that sampled.
        loss_type: "ppo_clip" or "reinforce".
        clip_ratio_low, clip_ratio_high, clip_ratio_c: of ppo_clip; see `vanilla`.

    Returns:
        (N) losses; per token ppo_kl, and with ppo_clip what else `vanilla` reports.

    Raises:
        ConfigError: another loss_type.

    When to use: the forward that recomputes old log-probs is to be saved, and the rollout's are trusted
        or corrected for.
    Watch: `rollout_corr/kl` the distance from the policy that sampled, which grows with each update of the
        batch; `actor/clip_fraction`.
    Cost: nothing; it saves one forward of the policy per batch.
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
