"""Aggregation of per-token losses into one number.

Every mode is a weighted sum over tokens. The weights contain the denominators of the whole mini-batch. So the
results of the micro-batches add up to the mini-batch's loss, however the mini-batch is split.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape, segment_sum, spread
from tandem.errors import ConfigError

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


def aggregate(
    values: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    mode: str,
    tokens: int,
    sequences: int,
    norm_length: float | None = None,
) -> Tensor:
    """Return the contribution of a micro-batch to the mini-batch's loss, a scalar.

    Equation (l_it is the loss of token t in sequence i; T_i is the number of counted tokens in sequence i):

        token-mean               sum_it l_it / tokens
        token-sum                sum_it l_it
        seq-mean-token-sum       sum_it l_it / sequences
        seq-mean-token-sum-norm  sum_it l_it / (sequences * norm_length)
        seq-mean-token-mean      sum_i (sum_t l_it / T_i) / sequences

    A sequence without a counted token does not change the loss in any mode. Such a sequence has an empty
    response or was rejected as a whole. verl's function has the same result when called alone. verl's trainer
    divides by all sequences of the mini-batch instead, which shrinks the update by the fraction of sequences
    without counted tokens.

    Args:
        values: (N) per-token losses l.
        mask: (N) bool, true at the tokens that count.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        mode: one of AGGREGATIONS.
        tokens: number of counted tokens in the global mini-batch.
        sequences: number of sequences in the global mini-batch with at least one counted token.
        norm_length: the constant length that seq-mean-token-sum-norm divides by.

    Raises:
        ConfigError: the mode is unknown, or the mode needs a norm_length and none is given.

    When to use: token-mean weighs all tokens equally, so long responses count more. seq-mean-token-mean
        weighs all responses equally. With token-sum and seq-mean-token-sum, the loss grows with the length.
        seq-mean-token-sum-norm divides by the same number for every response, which favours neither short nor
        long responses.
    Watch: `actor/grad_norm` has a different scale in each mode, so the learning rate must change with it;
        `response_length/mean` shows whether a mode drives the length up or down.
    Cost: nothing.
    Source: token-mean, Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, eq. 8; seq-mean-token-mean,
        Shao et al. 2024 (GRPO), https://arxiv.org/abs/2402.03300, eq. 3; seq-mean-token-sum-norm, Liu et al.
        2025 (Dr. GRPO), https://arxiv.org/abs/2503.20783, section 3.2.
    """
    require_same_shape(values, mask)
    assert mask.dtype == torch.bool, mask.dtype
    counted = torch.where(mask, values, 0)
    if mode == "seq-mean-token-mean":
        counted = counted / spread(segment_sum(mask, offsets), mask, offsets).clamp(min=1)
    return counted.sum() / _denominator(mode, max(tokens, 1), max(sequences, 1), norm_length)


def _denominator(mode: str, tokens: int, sequences: int, norm_length: float | None) -> float:
    denominators = dict.fromkeys(AGGREGATIONS, sequences) | {"token-mean": tokens, "token-sum": 1}
    if mode not in denominators:
        raise ConfigError("unknown loss aggregation", field="loss_agg_mode", got=mode, expected=AGGREGATIONS)
    if mode != "seq-mean-token-sum-norm":
        return denominators[mode]
    if norm_length is None or norm_length <= 0:
        raise ConfigError(
            "seq-mean-token-sum-norm divides by a constant length, which must be set",
            field="loss_scale_factor",
            got=norm_length,
            expected="a positive number, such as the maximum response length",
        )
    return sequences * norm_length
