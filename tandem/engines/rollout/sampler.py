"""Draws tokens from logits by inverting the cumulative distribution at one given uniform number per row.

Shape suffixes: R rows, V vocabulary, C candidates (the likeliest tokens, in falling order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 128  # tokens per block of the two-level search
_FIRST_CANDIDATES = 256
_BELOW_ONE = 1 - 2.0**-53


class Drawn(NamedTuple):
    """One token per row.

    Attributes:
        tokens_R: int64.
        log_probs_R: nats under the distribution drawn from; a greedy token's under the untempered one.
        untruncated_R: nats after temperature, before top-k and top-p.
    """

    tokens_R: Tensor
    log_probs_R: Tensor
    untruncated_R: Tensor


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of R rows on the device, and which paths they need.

    Attributes:
        temperature_R: float64; 1 for greedy rows.
        greedy_R: bool.
        top_k_R: int64; the vocabulary's size where there is none.
        top_p_R: float64.
        greedy: (none, some, all) greedy rows as 0, 1, 2.
        tempered: whether any temperature differs from 1.
        truncated_rows: indices of rows with top-k or top-p, or None.
    """

    temperature_R: Tensor
    greedy_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    greedy: int
    tempered: bool
    truncated_rows: Tensor | None

    @classmethod
    def of(
        cls,
        temperature_R: NDArray[np.float64],
        top_k_R: NDArray[np.int64],
        top_p_R: NDArray[np.float64],
        vocabulary: int,
        device: torch.device,
    ) -> RowParams:
        """From columns as in `SamplingParams`, for logits over `vocabulary` tokens; a top-k that leaves
        them all is none."""
        greedy_R = temperature_R == 0
        top_k_R = np.where((top_k_R > 0) & (top_k_R < vocabulary), top_k_R, vocabulary)
        truncated_R = ~greedy_R & ((top_k_R < vocabulary) | (top_p_R < 1))
        divisor_R = np.where(greedy_R, 1.0, temperature_R)

        def column(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values.copy()).to(device)

        return cls(
            temperature_R=column(divisor_R),
            greedy_R=column(greedy_R),
            top_k_R=column(top_k_R),
            top_p_R=column(top_p_R),
            greedy=2 if greedy_R.all() else int(greedy_R.any()),
            tempered=bool((divisor_R != 1).any()),
            truncated_rows=column(np.flatnonzero(truncated_R)) if truncated_R.any() else None,
        )


def sample(logits_RV: Tensor, uniforms_R: Tensor, params: RowParams) -> Drawn:
    """One token per row. Half-precision logits are widened to float32, float64 stays.

    NaN in a row's logits, or nothing but -inf, gives that row a NaN log-prob.

    Args:
        logits_RV: any floating dtype; not changed.
        uniforms_R: float64 in [0, 1).
    """
    assert logits_RV.shape[0] == len(uniforms_R) == len(params.greedy_R)
    scores_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    if params.tempered:
        scores_RV = scores_RV / params.temperature_R.to(scores_RV.dtype)[:, None]
    peak_R = scores_RV.amax(-1)
    weights_RV, ends_RN = _weights(scores_RV, peak_R)
    log_total_R = peak_R + ends_RN[:, -1].log().to(peak_R.dtype)
    if params.greedy == 2:
        tokens_R = scores_RV.argmax(-1)
    else:
        tokens_R = _draw(weights_RV, ends_RN, uniforms_R).clamp_(max=scores_RV.shape[1] - 1)  # if NaN
        if params.greedy == 1:
            tokens_R = torch.where(params.greedy_R, scores_RV.argmax(-1), tokens_R)
    untruncated_R = _picked(scores_RV, tokens_R) - log_total_R
    if params.truncated_rows is None:
        return Drawn(tokens_R, untruncated_R, untruncated_R)
    rows = params.truncated_rows
    cut_tokens, cut_log_probs = _draw_truncated(
        scores_RV[rows],
        peak_R[rows],
        ends_RN[rows, -1],
        uniforms_R[rows],
        params.top_k_R[rows],
        params.top_p_R[rows],
    )
    tokens_R = tokens_R.index_copy(0, rows, cut_tokens)
    log_probs_R = untruncated_R.index_copy(0, rows, cut_log_probs.to(untruncated_R.dtype))
    return Drawn(tokens_R, log_probs_R, _picked(scores_RV, tokens_R) - log_total_R)


def _picked(values_RV: Tensor, index_R: Tensor) -> Tensor:
    return values_RV.gather(-1, index_R[:, None]).squeeze(-1)


def _weights(scores_RV: Tensor, peak_R: Tensor) -> tuple[Tensor, Tensor]:
    """Weights exp(score - peak), padded with zeros to whole blocks of `_BLOCK` tokens, and their
    cumulative sums at the blocks' ends (R, N), float64."""
    weights_RV = (scores_RV - peak_R[:, None]).exp_()
    missing = -weights_RV.shape[1] % _BLOCK
    if missing:
        weights_RV = F.pad(weights_RV, (0, missing))
    blocks_RN = weights_RV.view(len(weights_RV), -1, _BLOCK).sum(-1)
    return weights_RV, blocks_RN.cumsum(-1, dtype=torch.float64)


def _draw(weights_RV: Tensor, ends_RN: Tensor, uniforms_R: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds the uniform's share of the total: first the
    block is found, then the token in it, so that one pass over the vocabulary is enough."""
    target_R = uniforms_R * ends_RN[:, -1]
    block_R = _first_above(ends_RN, target_R)
    end_R = _picked(ends_RN, block_R)
    begin_R = torch.where(block_R > 0, _picked(ends_RN, (block_R - 1).clamp_(min=0)), 0.0)
    first_R = block_R * _BLOCK
    columns = first_R[:, None] + torch.arange(_BLOCK, device=first_R.device)
    ends_in_block = weights_RV.gather(-1, columns).cumsum(-1, dtype=torch.float64)
    share_R = ((target_R - begin_R) / (end_R - begin_R)).clamp_(0.0, _BELOW_ONE)
    return first_R + _first_above(ends_in_block, share_R * ends_in_block[:, -1])


def _first_above(ends: Tensor, target_R: Tensor) -> Tensor:
    """Index of the first of the rising `ends` (R, N) above the target. As the target lies in [0, last
    end), an entry of weight zero is never chosen; a row of NaN gets the last index."""
    found = torch.searchsorted(ends, target_R[:, None], right=True).squeeze(-1)
    return found.clamp_(max=ends.shape[1] - 1)


def _draw_truncated(
    scores_RV: Tensor, peak_R: Tensor, total_R: Tensor, uniforms_R: Tensor, top_k_R: Tensor, top_p_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs after top-k, then top-p of what top-k left: the smallest set of likeliest
    tokens whose share reaches top_p, the token that reaches it included."""
    vocabulary = scores_RV.shape[1]
    candidates = min(_FIRST_CANDIDATES, vocabulary)
    while True:
        scores_RC, tokens_RC = scores_RV.topk(candidates, -1)
        weights_RC = (scores_RC - peak_R[:, None]).exp().double()
        rank_C = torch.arange(candidates, device=scores_RV.device)
        weights_RC = weights_RC * (rank_C < top_k_R[:, None])
        ends_RC = weights_RC.cumsum(-1)
        allowed_R = torch.where(top_k_R < vocabulary, ends_RC[:, -1], total_R)
        enough_R = (top_k_R <= candidates) | ((top_k_R >= vocabulary) & (ends_RC[:, -1] >= top_p_R * total_R))
        if candidates == vocabulary or bool((enough_R | total_R.isnan()).all()):
            break
        candidates = min(candidates * 8, vocabulary)
    kept_RC = (ends_RC - weights_RC) < (top_p_R * allowed_R)[:, None]
    weights_RC = weights_RC * kept_RC
    ends_RC = weights_RC.cumsum(-1)
    pick_R = _first_above(ends_RC, uniforms_R * ends_RC[:, -1])
    log_total_R = peak_R + ends_RC[:, -1].log()
    return _picked(tokens_RC, pick_R), _picked(scores_RC, pick_R) - log_total_R
