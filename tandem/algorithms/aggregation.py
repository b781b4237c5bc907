"""From per-token losses to one number.

Every mode is a weighted sum over the tokens whose weights hold the denominators of the whole
mini-batch, so that the micro-batches' numbers add up to the mini-batch's, however it is cut.
Shapes: N tokens of all sequences together, B sequences.
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
    """A micro-batch's share of the mini-batch's loss, a scalar.

        token-mean               sum_it l_it / tokens
        token-sum                sum_it l_it
        seq-mean-token-sum       sum_it l_it / sequences
        seq-mean-token-sum-norm  sum_it l_it / (sequences * norm_length)
        seq-mean-token-mean      sum_i (sum_t l_it / T_i) / sequences

    A sequence without a token that counts, an empty response or one that was rejected whole, is no term of a
    mean: with it the loss is what it is without it, as under token-mean. verl's function, called alone, does
    the same; its trainer divides by all sequences of the mini-batch instead, which shrinks the update by the
    share of such ones.

    Args:
        values: (N) per-token losses l.
        mask: (N) bool, the tokens that count; T_i of them in sequence i.
        offsets: (B+1) int64.
        mode: one of AGGREGATIONS.
        tokens: true entries of the mask in the global mini-batch.
        sequences: sequences of the global mini-batch with at least one of them.
        norm_length: the constant length of seq-mean-token-sum-norm.

    Raises:
        ConfigError: an unknown mode, or no norm_length where the mode needs one.

    When to use: token-mean weighs every token alike, so long responses count more; seq-mean-token-mean
    weighs every response alike; the two sums leave the length in; seq-mean-token-sum-norm divides by the
    same number whatever is written, which favours neither short nor long.
    Watch: `actor/grad_norm` changes its scale with the mode, and the learning rate with it;
    `response_length/mean` tells whether a mode drives the length.
    Cost: nothing.
    Source: token-mean, Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, eq. 8;
    seq-mean-token-mean, Shao et al. 2024 (GRPO), https://arxiv.org/abs/2402.03300, eq. 3;
    seq-mean-token-sum-norm, Liu et al. 2025 (Dr. GRPO), https://arxiv.org/abs/2503.20783, section 3.2.
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
        raise ConfigError("no such aggregation", field="loss_agg_mode", got=mode, expected=AGGREGATIONS)
    if mode != "seq-mean-token-sum-norm":
        return denominators[mode]
    if norm_length is None or norm_length <= 0:
        raise ConfigError(
            "this aggregation divides by a constant length",
            field="loss_scale_factor",
            got=norm_length,
            expected="a positive number, such as the longest response allowed",
        )
    return sequences * norm_length
