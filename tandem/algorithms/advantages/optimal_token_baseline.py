"""The optimal token baseline, and its form for several turns."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import kept_tokens, scatter
from tandem.algorithms.registry import Advantages, register_advantage
from tandem.algorithms.scan import discounted_cumsum, reverse_discounted_cumsum_


@register_advantage("optimal_token_baseline")
def optimal_token_baseline(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    group: Tensor,
    rollout_is_weights: Tensor,
    *,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> Advantages:
    """The rewards still to come less a baseline of its own for each place in the response.

    Equation (pi_s the probability of token s, over response tokens; the sums of b over the samples of the
    prompt that have a response token at the same place, counted from the response's first token):

        w_s = rho_s**2 * (1 - 2 * pi_s + sum_v pi_s(v)**2)       (rho the rollout_is_weights)
        W_t = sum_{s <= t} w_s
        G_t = sum_{s >= t} r_s
        b_t = sum_j G_jt * W_jt / (sum_j W_jt + epsilon)
        A_t = G_t - b_t

    Args:
        handle_zero_tail: whether b is zero at places where the group has one sample; it always is for a
            sample that is alone in its group.
        epsilon: keeps the quotient finite.

    Returns:
        The advantages A; returns are G.

    When to use: long responses whose gradient's variance makes training collapse; small groups.
    Watch: `actor/grad_norm` stays level where a mean as baseline lets it surge.
    Cost: sum_pi_squared from the head, log-probs computed again before the updates; no further model.
    Source: Li et al. 2026, https://arxiv.org/abs/2602.07078, the baseline with the logit-gradient proxy.
    """
    columns = token_level_rewards, old_log_probs, sum_pi_squared, rollout_is_weights
    return _token_baseline(columns, response_mask, offsets, group, False, handle_zero_tail, epsilon)


@register_advantage("tir_optimal_token_baseline")
def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    group: Tensor,
    rollout_is_weights: Tensor,
    *,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> Advantages:
    """The optimal token baseline for several turns, with places counted in response tokens only.

    Equation (t the number of response tokens before this one, whatever tools wrote in between; w, W and G as
    in `optimal_token_baseline`):

        b_t = sum_j G_jt * W_jt / (sum_j W_jt + epsilon)
        A_t = G_t - b_t

    Args:
        handle_zero_tail: whether b is zero at places where the group has one sample; it always is for a
            sample that is alone in its group.
        epsilon: keeps the quotient finite.

    Returns:
        The advantages A; returns are G.

    When to use: as the other form, in several turns with tools, whose answers differ in length.
    Watch: `actor/grad_norm` stays level where a mean as baseline lets it surge.
    Cost: sum_pi_squared from the head, log-probs computed again before the updates; no further model.
    Source: Li et al. 2026, https://arxiv.org/abs/2602.07078, the form for tool-integrated reasoning.
    """
    columns = token_level_rewards, old_log_probs, sum_pi_squared, rollout_is_weights
    return _token_baseline(columns, response_mask, offsets, group, True, handle_zero_tail, epsilon)


def _token_baseline(
    columns: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Tensor,
    offsets: Tensor,
    group: Tensor,
    compact: bool,
    handle_zero_tail: bool,
    epsilon: float,
) -> Advantages:
    """Advantages and returns by token, computed in float64: sums of many small weights are compared.

    Args:
        columns: rewards, log-probs, sums of squared probabilities, importance weights.
        compact: whether places skip tokens outside the mask.
    """
    kept, kept_offsets = kept_tokens(mask, offsets)
    rewards, log_probs, squares, rho = (column.index_select(0, kept).double() for column in columns)
    weights = squares.add_(1).sub_(log_probs.exp_(), alpha=2).mul_(rho.square_())
    weights = discounted_cumsum(weights, kept_offsets, 1.0)
    sums = reverse_discounted_cumsum_(rewards, kept_offsets, 1.0)
    # A number for each token's group and its place in the response, and that of its group's first place.
    lengths = kept_offsets.diff()
    starts = kept_offsets[:-1].repeat_interleave(lengths, output_size=len(kept))
    place = torch.arange(len(kept), device=kept.device) - starts if compact else kept - kept[starts]
    longest = int(place.max()) + 1 if len(place) else 0
    first = (group * longest).repeat_interleave(lengths, output_size=len(kept))
    at = first + place
    count = at.bincount()
    weighted = at.bincount(sums * weights) / (at.bincount(weights) + epsilon)
    alone = count[at] == 1 if handle_zero_tail else count[first] == 1
    advantages = sums - weighted[at].masked_fill_(alone, 0)
    dtype = columns[0].dtype
    return Advantages(
        scatter(advantages.to(dtype), kept, len(mask)), scatter(sums.to(dtype), kept, len(mask))
    )
