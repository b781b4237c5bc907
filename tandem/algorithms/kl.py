"""KL penalties: per-token estimates, their use in the reward, and the controllers of their weight.

Shapes: N tokens of all sequences together, B sequences.
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
"""The exact KL over the vocabulary, which is computed with the model's outputs, not from log-probs."""

KL_KINDS = tuple(name + plus for name in (*KL_ESTIMATORS.names, *KL_ESTIMATORS.aliases) for plus in ("", "+"))


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimates of KL(policy || reference) from the tokens sampled, by the estimator of that name; with a +
    at its end the same values with the gradient of k2, see `straight_through`.

    Args:
        log_probs: (N) nats; the gradient flows through it.
        ref_log_probs: (N) nats.
        kind: one of KL_KINDS, or a user's `file.py:function`, with a + or without.

    Returns:
        (N) estimates per token.

    Raises:
        ConfigError: an unknown kind, or a user's function that cannot be used.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    require_same_shape(log_probs, ref_log_probs)
    estimator = kl_estimator(kind.removesuffix("+"))
    values = estimator({"log_probs": log_probs, "ref_log_probs": ref_log_probs})
    return straight_through(values, log_probs, ref_log_probs) if kind.endswith("+") else values


def weighted_kl(
    log_probs: Tensor, ref_log_probs: Sequence[Tensor], weights: Sequence[float], kind: str
) -> Tensor:
    """The KLs to several references in one penalty.

    Equation:

        kl_t = Σ_i w_i · k(log π(t), log ref_i(t))

    with the estimator k of that kind, for each reference by itself.

    Args:
        log_probs: (N) nats; the gradient flows through it.
        ref_log_probs: (N) nats, of each reference.
        weights: of each.
        kind: see `kl_penalty`.

    Returns:
        (N).
    """
    assert len(ref_log_probs) == len(weights) > 0, (len(ref_log_probs), len(weights))
    terms = [w * kl_penalty(log_probs, ref, kind) for w, ref in zip(weights, ref_log_probs, strict=True)]
    return functools.reduce(torch.add, terms)


class PenalisedRewards(NamedTuple):
    """Rewards less the KL penalty.

    Attributes:
        token_level_rewards: (N).
        kl: scalar, the mean over sequences of each one's mean over its response tokens.
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
    """KL in the reward.

    Equation:

        r_t = score_t - kl_coef * kl_t    at response tokens

    Args:
        token_level_scores: (N).
        old_log_probs, ref_log_probs: (N) nats; of several references one each.
        response_mask: (N) bool.
        offsets: (B+1) int64.
        kind: one of KL_KINDS.
        kl_coef: the controller's value.
        weights: of the KL to each reference, see `weighted_kl`.

    When to use: with a critic, which then learns the penalty too; without one the KL as a loss
    (`actor_rollout_ref.actor.use_kl_loss`) has less noise.
    Watch: `actor/kl_in_reward` how far the policy has gone; `reward/after_kl` against `reward/mean` what the
    penalty takes.
    Cost: a reference and a forward pass of it; old log-probs even with one update per step.
    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, eq. 2.
    """
    references = [ref_log_probs] if isinstance(ref_log_probs, Tensor) else ref_log_probs
    kl = weighted_kl(old_log_probs, references, weights, kind)
    return penalise(token_level_scores, kl, response_mask, offsets, kl_coef=kl_coef)


def penalise(
    token_level_scores: Tensor, kl: Tensor, response_mask: Tensor, offsets: Tensor, *, kl_coef: float
) -> PenalisedRewards:
    """`apply_kl_penalty` with a KL per token that is there already.

    Args:
        token_level_scores: (N).
        kl: (N) nats.
        response_mask: (N) bool.
        offsets: (B+1) int64.
        kl_coef: the controller's value.
    """
    kl = torch.where(response_mask, kl, 0)
    per_sequence = segment_mean(kl, response_mask, offsets)
    mean = per_sequence.sum() / max(len(per_sequence), 1)
    return PenalisedRewards(token_level_scores - kl_coef * kl, mean)


class FixedKLController:
    """A constant KL coefficient.

    Args:
        kl_coef: the coefficient.
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing; a fixed coefficient does not answer to the KL."""

    def state_dict(self) -> dict[str, float]:
        """An empty state: the config says the coefficient, at a resume too."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Does nothing."""


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that steers the KL towards a target:

        value <- value * (1 + clip(current_kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon)

    Args:
        init_kl_coef: the coefficient at the start.
        target_kl: in nats per token, as `apply_kl_penalty` measures it.
        horizon: samples; the larger, the slower the coefficient moves.

    Raises:
        ConfigError: a target or a horizon that is not positive.

    When to use: where a known distance from the reference is wanted and a good coefficient is not known.
    Watch: `actor/kl_coef` should settle; `actor/kl_in_reward` should come to target_kl.
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
        """Moves the coefficient after `n_steps` samples whose mean KL was `current_kl`."""
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on from a saved coefficient; from the initial one if the run had a fixed one before."""
        self.value = state.get("value", self.value)


def kl_controller(
    kind: str, kl_coef: float, target_kl: float, horizon: int
) -> FixedKLController | AdaptiveKLController:
    """The controller of that kind, "fixed" or "adaptive"; a fixed one has neither target nor horizon."""
    return (
        FixedKLController(kl_coef) if kind == "fixed" else AdaptiveKLController(kl_coef, target_kl, horizon)
    )
