"""KL penalties: estimates per token, their use in the reward, and controllers of the coefficient.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.kl_estimators import straight_through
from tandem.algorithms.masked import require_same_shape, segment_mean
from tandem.algorithms.registry import KL_ESTIMATORS, kl_estimator
from tandem.errors import ConfigError

FULL = "full"
"""The name of the exact KL over the vocabulary, computed from the model's outputs instead of log-probs."""

KL_KINDS = tuple(name + plus for name in (*KL_ESTIMATORS.names, *KL_ESTIMATORS.aliases) for plus in ("", "+"))


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) per token with the named estimator.

    If `kind` ends with "+", the values are the same as without it, but the gradient is the gradient of k2;
    see `straight_through`.

    Args:
        log_probs: (N) nats; the gradient flows through it.
        ref_log_probs: (N) nats.
        kind: one of KL_KINDS, or a user's `file.py:function`, with or without a "+" at the end.

    Returns:
        (N) estimates.

    Raises:
        ConfigError: the kind is unknown, or the user's function cannot be used.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    require_same_shape(log_probs, ref_log_probs)
    estimator = kl_estimator(kind.removesuffix("+"))
    values = estimator({"log_probs": log_probs, "ref_log_probs": ref_log_probs})
    return straight_through(values, log_probs, ref_log_probs) if kind.endswith("+") else values


def weighted_kl(
    log_probs: Tensor, ref_log_probs: Sequence[Tensor], weights: Sequence[float], kind: str
) -> Tensor:
    """Return the weighted sum of the KLs to several references.

    Equation (k is the estimator of that kind, applied to each reference separately):

        kl_t = Σ_i w_i · k(log π(t), log ref_i(t))

    Args:
        log_probs: (N) nats; the gradient flows through it.
        ref_log_probs: one tensor (N) per reference, nats.
        weights: one weight per reference.
        kind: see `kl_penalty`.

    Returns:
        (N) estimates.
    """
    assert len(ref_log_probs) == len(weights) > 0, (len(ref_log_probs), len(weights))
    terms = [w * kl_penalty(log_probs, ref, kind) for w, ref in zip(weights, ref_log_probs, strict=True)]
    return functools.reduce(torch.add, terms)


class PenalisedRewards(NamedTuple):
    """Rewards after the KL penalty.

    Attributes:
        token_level_rewards: (N).
        kl: scalar; the mean over sequences of each sequence's mean KL over its response tokens.
    """

    token_level_rewards: Tensor
    kl: Tensor


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor | Sequence[Tensor],
    response_mask: Tensor,
    offsets: Tensor,
    *,
    kind: str,
    kl_coef: float,
    weights: Sequence[float] = (1.0,),
) -> PenalisedRewards:
    """Subtract the KL penalty from the reward of each token.

    Equation:

        r_t = score_t - kl_coef * kl_t    at response tokens

    Args:
        token_level_scores: (N) rewards before the penalty.
        old_log_probs: (N) nats.
        ref_log_probs: (N) nats; with several references, one tensor (N) per reference.
        response_mask: (N) bool, true at response tokens.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        kind: one of KL_KINDS.
        kl_coef: the coefficient, from the KL controller.
        weights: weight of the KL to each reference, see `weighted_kl`.

    When to use: with a critic, which then learns the penalty too. Without a critic, the KL as a loss
        (`actor_rollout_ref.actor.use_kl_loss`) is less noisy.
    Watch: `actor/kl_in_reward` is how far the policy has moved from the reference; `reward/after_kl` compared
        with `reward/mean` is how much reward the penalty takes.
    Cost: a reference model and its forward pass; old log-probs even with one update per step.
    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, eq. 2.
    """
    references = [ref_log_probs] if isinstance(ref_log_probs, Tensor) else ref_log_probs
    kl = weighted_kl(old_log_probs, references, weights, kind)
    return penalise(token_level_scores, kl, response_mask, offsets, kl_coef=kl_coef)


def penalise(
    token_level_scores: Tensor, kl: Tensor, response_mask: Tensor, offsets: Tensor, *, kl_coef: float
) -> PenalisedRewards:
    """Subtract the penalty from the reward of each token, for a given KL per token.

    Args:
        token_level_scores: (N) rewards before the penalty.
        kl: (N) nats.
        response_mask: (N) bool, true at response tokens.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        kl_coef: the coefficient, from the KL controller.
    """
    kl = torch.where(response_mask, kl, 0)
    per_sequence = segment_mean(kl, response_mask, offsets)
    mean = per_sequence.sum() / max(len(per_sequence), 1)
    return PenalisedRewards(token_level_scores - kl_coef * kl, mean)


class FixedKLController:
    """A controller with a constant KL coefficient.

    Args:
        kl_coef: the coefficient.
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing, because the coefficient does not depend on the KL."""

    def state_dict(self) -> dict[str, float]:
        """Return {}: a fixed coefficient always comes from the config, also after a resume."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing."""


class AdaptiveKLController(FixedKLController):
    """A controller that adjusts the KL coefficient so that the KL approaches a target.

        value <- value * (1 + clip(current_kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon)

    Args:
        init_kl_coef: the initial coefficient.
        target_kl: target KL, nats per token, as `apply_kl_penalty` measures it.
        horizon: number of samples; the larger it is, the slower the coefficient changes.

    Raises:
        ConfigError: the target or the horizon is not positive.

    When to use: if you know how far the policy should be from the reference, but not which coefficient leads
        there.
    Watch: `actor/kl_coef` should settle; `actor/kl_in_reward` should approach target_kl.
    Cost: nothing beyond the KL in the reward.
    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2; n_steps / horizon as in the
        authors' code, 0.1 in the paper.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        for name, given in (("target_kl", target_kl), ("horizon", horizon)):
            if given <= 0:
                raise ConfigError("out of range", field=f"kl_ctrl.{name}", got=given, expected="> 0")
        super().__init__(init_kl_coef)
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adjust the coefficient after `n_steps` samples whose mean KL was `current_kl`."""
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved coefficient.

        If the saved run had a fixed coefficient, the state is empty, and the coefficient does not change.
        """
        self.value = state.get("value", self.value)


def kl_controller(
    kind: str, kl_coef: float, target_kl: float, horizon: int
) -> FixedKLController | AdaptiveKLController:
    """Return the controller of the given kind, "fixed" or "adaptive".

    The fixed controller ignores `target_kl` and `horizon`.
    """
    return (
        FixedKLController(kl_coef) if kind == "fixed" else AdaptiveKLController(kl_coef, target_kl, horizon)
    )
