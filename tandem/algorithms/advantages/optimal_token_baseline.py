"""The optimal token baseline, and its variant for multi-turn responses.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

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
    """Subtract a separate baseline at each position of the response from the rewards still to come.

    Equation (pi_s is the probability of token s; s and t run over response tokens; rho is rollout_is_weights;
    the sums in b_t are over the prompt's samples that have a response token at position t, counted from the
    first token of the response):

        w_s = rho_s**2 * (1 - 2 * pi_s + sum_v pi_s(v)**2)
        W_t = sum_{s <= t} w_s
        G_t = sum_{s >= t} r_s
        b_t = sum_j G_jt * W_jt / (sum_j W_jt + epsilon)
        A_t = G_t - b_t

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        sum_pi_squared: (N) fp32, sum over the vocabulary of pi(v)**2 at the token's position.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.
        rollout_is_weights: (N) fp32, importance weights of the rollout correction; all 1 without a
            correction.
        handle_zero_tail: whether b is 0 at positions that only one sample of the group reaches. For a sample
            that is alone in its group, b is always 0.
        epsilon: added to the denominator, so that the quotient stays finite.

    Returns:
        The advantages A (N) and the returns G (N).

    When to use: long responses for which the variance of the gradient makes training collapse; small groups.
    Watch: `actor/grad_norm` stays level; with a plain mean as the baseline it has spikes.
    Cost: sum_pi_squared from the output head, and log-probs recomputed before the updates; no additional
        model.
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
    """Compute the optimal token baseline with positions that count response tokens only.

    Equation (t is the number of response tokens before this one, ignoring what tools wrote in between; w, W
    and G are defined as in `optimal_token_baseline`):

        b_t = sum_j G_jt * W_jt / (sum_j W_jt + epsilon)
        A_t = G_t - b_t

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        sum_pi_squared: (N) fp32, sum over the vocabulary of pi(v)**2 at the token's position.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.
        rollout_is_weights: (N) fp32, importance weights of the rollout correction; all 1 without a
            correction.
        handle_zero_tail: whether b is 0 at positions that only one sample of the group reaches. For a sample
            that is alone in its group, b is always 0.
        epsilon: added to the denominator, so that the quotient stays finite.

    Returns:
        The advantages A (N) and the returns G (N).

    When to use: like `optimal_token_baseline`, for multi-turn responses with tools whose outputs differ in
        length.
    Watch: `actor/grad_norm` stays level; with a plain mean as the baseline it has spikes.
    Cost: sum_pi_squared from the output head, and log-probs recomputed before the updates; no additional
        model.
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
    """Compute advantages and returns per token.

    Computed in float64, because the sums add and compare many small weights.

    Args:
        columns: (N) each: rewards, log-probs, sums of squared probabilities, importance weights.
        mask: (N) bool, the response tokens.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.
        compact: whether positions skip tokens outside the mask.
        handle_zero_tail: see `optimal_token_baseline`.
        epsilon: see `optimal_token_baseline`.
    """
    kept, kept_offsets = kept_tokens(mask, offsets)
    rewards, log_probs, squares, rho = (column.index_select(0, kept).double() for column in columns)
    weights = squares.add_(1).sub_(log_probs.exp_(), alpha=2).mul_(rho.square_())
    weights = discounted_cumsum(weights, kept_offsets, 1.0)
    sums = reverse_discounted_cumsum_(rewards, kept_offsets, 1.0)
    # `at` numbers the pairs of (group, position in the response); `first` is the group's position 0.
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
