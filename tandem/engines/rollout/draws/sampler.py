"""Token sampling from logits with one given uniform random number per row.

The token is the point at which the cumulative distribution exceeds the number (inverse transform sampling).

Shape suffixes: R rows, V vocabulary, N blocks of the vocabulary, C rows with truncation (min-p, top-k or
top-p), K candidates (the most likely tokens, in descending order), E rows with edited logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tandem.device import upload
from tandem.engines.rollout.draws.edits import Edits
from tandem.protocol.rollout import LogprobsMode

_TRITON = find_spec("triton") is not None
_BLOCK = 128  # tokens per block of the two-level search
_FIRST_CANDIDATES = 256
_BELOW_ONE = 1 - 2.0**-53
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Drawn(NamedTuple):
    """The sampled token of each row, and its log-probs.

    Attributes:
        tokens_R: int64, the token ids.
        log_probs_R: The log-prob, in nats, under the distribution that was sampled from. A greedy row uses
            the distribution without temperature and truncation.
        untruncated_R: The log-prob, in nats, under softmax(logits / temperature) of the unedited logits. The
            temperature is 1 for greedy rows.
        requested_R: The log-probs that `logprobs_mode` requests.
    """

    tokens_R: Tensor
    log_probs_R: Tensor
    untruncated_R: Tensor
    requested_R: Tensor


@dataclass(frozen=True, slots=True)
class Cuts:
    """The rows with truncated distributions (C of R rows), and their thresholds.

    Attributes:
        rows_C: int64, the row numbers.
        min_p_C: float64. None if no row has min-p.
        top_k_C: int64. The vocabulary's size in rows without top-k. None if no row has top-k.
        top_p_C: float64. None if no row has top-p.
        widest: The largest top-k of all rows, or 0 if no row has top-k.
        unbounded: Whether a row has top-p and no top-k.
    """

    rows_C: Tensor
    min_p_C: Tensor | None
    top_k_C: Tensor | None
    top_p_C: Tensor | None
    widest: int
    unbounded: bool


@dataclass(frozen=True, slots=True)
class RowParams:
    """The sampling parameters of R rows on the device, and flags for the code paths that they need.

    Attributes:
        temperature_R: float64. 1 for greedy rows.
        greedy_R: bool, true for greedy rows.
        greedy: 0 if no row is greedy, 1 if some rows are, 2 if all rows are.
        tempered: Whether any temperature differs from 1.
        cuts: The rows with min-p, top-k or top-p, or None.
        edits: The rows with biases or penalties, or None. Each step builds its edits from them.
    """

    temperature_R: Tensor
    greedy_R: Tensor
    greedy: int
    tempered: bool
    cuts: Cuts | None
    edits: Edits | None = None

    @classmethod
    def of(
        cls,
        temperature_R: NDArray[np.float64],
        top_k_R: NDArray[np.int64],
        top_p_R: NDArray[np.float64],
        min_p_R: NDArray[np.float64],
        vocabulary: int,
        device: torch.device,
        edits: Edits | None = None,
    ) -> RowParams:
        """Build the parameters of rows whose logits have `vocabulary` entries.

        The first four arguments have the values of `SamplingParams`. A top-k that keeps all tokens counts as
        no top-k.
        """
        greedy_R = temperature_R == 0
        top_k_R = np.where((top_k_R > 0) & (top_k_R < vocabulary), top_k_R, vocabulary)
        cut_R = ~greedy_R & ((top_k_R < vocabulary) | (top_p_R < 1) | (min_p_R > 0))
        divisor_R = np.where(greedy_R, 1.0, temperature_R)

        cuts = None
        if cut_R.any():
            k, p, low = top_k_R[cut_R], top_p_R[cut_R], min_p_R[cut_R]
            bounded = k < vocabulary
            cuts = Cuts(
                rows_C=upload(np.flatnonzero(cut_R), device),
                min_p_C=upload(low, device) if low.any() else None,
                top_k_C=upload(k, device) if bounded.any() else None,
                top_p_C=upload(p, device) if (p < 1).any() else None,
                widest=int(k[bounded].max(initial=0)),
                unbounded=bool(((p < 1) & ~bounded).any()),
            )
        return cls(
            temperature_R=upload(divisor_R, device),
            greedy_R=upload(greedy_R, device),
            greedy=2 if greedy_R.all() else int(greedy_R.any()),
            tempered=bool((divisor_R != 1).any()),
            cuts=cuts,
            edits=edits,
        )


def sample(
    logits_RV: Tensor,
    uniforms_R: Tensor,
    params: RowParams,
    edits: Edits | None = None,
    mode: LogprobsMode = "processed_logprobs",
) -> Drawn:
    """Sample one token per row.

    The parameters are applied in the order that `SamplingParams` documents, which is vLLM's order.
    Half-precision logits are converted to float32. float64 logits stay float64.

    The host does not wait for the device. If a row's logits have NaN, or only -inf, its log-prob is NaN.

    Args:
        logits_RV: The logits, in any floating dtype. They are not changed.
        uniforms_R: Random numbers, float64 in [0, 1).
        params: The parameters of the rows.
        edits: The edits of this step. The edits in `params` are ignored.
        mode: Which log-probs to return in `requested_R`.
    """
    assert logits_RV.shape[0] == len(uniforms_R) == len(params.greedy_R)
    plain = edits is None and params.cuts is None and mode == "processed_logprobs"
    if plain and logits_RV.is_cuda and logits_RV.dtype != torch.float64 and _TRITON:
        # One pass over the logits instead of about ten. The module is loaded by name because it imports
        # Triton.
        one_pass = import_module("tandem.engines.rollout.draws.sampler_triton").sample_uncut
        tokens_R, log_probs_R = one_pass(logits_RV, uniforms_R, params.temperature_R, params.greedy_R)
        return Drawn(tokens_R, log_probs_R, log_probs_R, log_probs_R)
    raw_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    scores_RV = raw_RV if edits is None else edits.applied(raw_RV)
    if params.tempered:
        scores_RV = scores_RV / params.temperature_R.to(scores_RV.dtype)[:, None]
    peak_R = scores_RV.amax(-1)
    weights_RV, ends_RN = _weights(scores_RV, peak_R)
    log_total_R = _log_total(peak_R, ends_RN)
    whole_R = log_total_R
    if params.cuts is not None:
        weights_RV, ends_RN = _cut(params.cuts, scores_RV, peak_R, weights_RV, ends_RN)
        log_total_R = _log_total(peak_R, ends_RN)
    if params.greedy == 2:
        tokens_R = scores_RV.argmax(-1)
    else:
        tokens_R = _draw(weights_RV, ends_RN, uniforms_R).clamp_(
            max=scores_RV.shape[1] - 1
        )  # the index is too large if NaN
        if params.greedy == 1:
            tokens_R = torch.where(params.greedy_R, scores_RV.argmax(-1), tokens_R)
    picked_R = _picked(scores_RV, tokens_R)
    log_probs_R = picked_R - log_total_R
    untruncated_R = picked_R - whole_R
    if edits is not None:
        own_E = _own_log_probs(raw_RV, tokens_R, params, edits.rows_E)
        untruncated_R = untruncated_R.index_copy(0, edits.rows_E, own_E)
        if edits.penalties is not None:
            edits.penalties.note(tokens_R)
    requested_R = log_probs_R if mode == "processed_logprobs" else picked_R
    if mode.startswith("raw"):
        requested_R = _picked(raw_RV if mode == "raw_logits" else raw_RV.log_softmax(-1), tokens_R)
    return Drawn(tokens_R, log_probs_R, untruncated_R, requested_R)


def _picked(values_RV: Tensor, index_R: Tensor) -> Tensor:
    return values_RV.gather(-1, index_R[:, None]).squeeze(-1)


def _own_log_probs(raw_RV: Tensor, tokens_R: Tensor, params: RowParams, rows_E: Tensor) -> Tensor:
    """Return the log-probs, in nats, under softmax(logits / temperature) for rows with edited logits."""
    tokens_E, own_EV = tokens_R[rows_E], raw_RV if len(rows_E) == len(raw_RV) else raw_RV[rows_E]
    if params.tempered:
        own_EV = own_EV / params.temperature_R[rows_E].to(raw_RV.dtype)[:, None]
    return _picked(own_EV, tokens_E) - own_EV.logsumexp(-1)


def _weights(scores_RV: Tensor, peak_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights exp(score - peak) and their `_ends`.

    The weights are padded with zeros to whole blocks of `_BLOCK` tokens.
    """
    weights_RV = (scores_RV - peak_R[:, None]).exp_()
    missing = -weights_RV.shape[1] % _BLOCK
    if missing:
        weights_RV = F.pad(weights_RV, (0, missing))
    return weights_RV, _ends(weights_RV)


def _ends(weights_RV: Tensor) -> Tensor:
    """Return the cumulative sum of the weights at the end of each block, (R, N) float64."""
    return weights_RV.view(len(weights_RV), -1, _BLOCK).sum(-1).cumsum(-1, dtype=torch.float64)


def _draw(weights_RV: Tensor, ends_RN: Tensor, uniforms_R: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds the uniform number times the total weight.

    The block is searched first, then the token inside the block. So one pass over the vocabulary is enough.
    """
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
    """Return for each row the first index at which the ascending `ends` (R, N) exceed the target.

    The target lies in [0, last end), so an entry of weight zero is never chosen. A row of NaN values gets the
    last index.
    """
    found = torch.searchsorted(ends, target_R[:, None], right=True).squeeze(-1)
    return found.clamp_(max=ends.shape[1] - 1)


def _log_total(peak_R: Tensor, ends_RN: Tensor) -> Tensor:
    return peak_R + ends_RN[:, -1].log().to(peak_R.dtype)


def _cut(
    cuts: Cuts, scores_RV: Tensor, peak_R: Tensor, weights_RV: Tensor, ends_RN: Tensor
) -> tuple[Tensor, Tensor]:
    """Set the weights of truncated tokens to zero, in place, and return the weights and their `_ends`.

    Each row keeps all tokens whose score reaches the row's threshold. So the result does not depend on the
    order of equal scores, nor on other rows.
    """
    whole = len(cuts.rows_C) == len(scores_RV)
    scores_CV, peak_C, weights_CV, ends_CN = (
        part if whole else part[cuts.rows_C] for part in (scores_RV, peak_R, weights_RV, ends_RN)
    )
    vocabulary = scores_CV.shape[1]
    floor_C = torch.full_like(peak_C, -torch.inf)
    best_CK = _candidates(cuts, scores_CV)
    if cuts.top_k_C is not None:
        kth_C = _picked(best_CK, (cuts.top_k_C - 1).clamp(max=best_CK.shape[1] - 1))
        floor_C = torch.where(cuts.top_k_C < vocabulary, kth_C, floor_C)
    if cuts.min_p_C is not None:
        floor_C = torch.maximum(floor_C, peak_C + cuts.min_p_C.log().to(peak_C.dtype))
    if cuts.top_k_C is not None or cuts.min_p_C is not None:
        ends_CN = _keep(weights_CV, scores_CV, floor_C)
    if cuts.top_p_C is not None:
        limited_C = cuts.top_p_C < 1
        goal_C = torch.where(limited_C, cuts.top_p_C * ends_CN[:, -1], 0.0)
        nucleus_C = _nucleus_floor(best_CK, scores_CV, weights_CV, peak_C, floor_C, goal_C, cuts.unbounded)
        ends_CN = _keep(weights_CV, scores_CV, torch.where(limited_C, nucleus_C, floor_C))
    if whole:
        return weights_CV, ends_CN
    return weights_RV.index_copy_(0, cuts.rows_C, weights_CV), ends_RN.index_copy_(0, cuts.rows_C, ends_CN)


def _keep(weights_CV: Tensor, scores_CV: Tensor, floor_C: Tensor) -> Tensor:
    """Set weights below the floor to zero, in place, and return their `_ends`."""
    weights_CV[:, : scores_CV.shape[1]].masked_fill_(scores_CV < floor_C[:, None], 0.0)
    return _ends(weights_CV)


def _candidates(cuts: Cuts, scores_CV: Tensor) -> Tensor:
    """Return the highest scores of each row, in descending order.

    These are all scores that top-k needs. On a CPU they include the scores that top-p tries first.
    """
    count = cuts.widest
    if cuts.top_p_C is not None and (not cuts.unbounded or scores_CV.device.type == "cpu"):
        count = max(count, _FIRST_CANDIDATES)
    return scores_CV.topk(min(count, scores_CV.shape[1]), -1).values if count else scores_CV[:, :0]


def _nucleus_floor(
    best_CK: Tensor,
    scores_CV: Tensor,
    weights_CV: Tensor,
    peak_C: Tensor,
    floor_C: Tensor,
    goal_C: Tensor,
    unbounded: bool,
) -> Tensor:
    """Return the score threshold at which the summed weight of the most likely tokens reaches the goal.

    The result is the score of the last token that is kept, or another number that keeps the same tokens.

    Args:
        best_CK: The highest scores.
        scores_CV: All scores.
        weights_CV: The weights, zero below `floor_C`.
        peak_C: The highest score of each row.
        floor_C: The lowest score that is not truncated yet.
        goal_C: The weight to reach.
        unbounded: Whether the scores in `best_CK` may be too few to reach a row's goal. Only the device knows
            whether they are, and the host would have to wait for the answer. So on devices other than the
            CPU, all rows are searched.
    """
    if unbounded and scores_CV.device.type != "cpu":
        return _searched_floor(scores_CV, weights_CV, goal_C)
    weights_CK = (best_CK - peak_C[:, None]).exp().masked_fill(best_CK < floor_C[:, None], 0.0)
    ends_CK = weights_CK.cumsum(-1, dtype=torch.float64)
    below_C = (ends_CK < goal_C[:, None]).sum(-1)
    nucleus_C = _picked(best_CK, below_C.clamp(max=best_CK.shape[1] - 1))
    if unbounded:
        beyond = (below_C == best_CK.shape[1]).nonzero().squeeze(-1)
        if len(beyond):
            nucleus_C[beyond] = _searched_floor(scores_CV[beyond], weights_CV[beyond], goal_C[beyond])
    return nucleus_C


def _searched_floor(scores_CV: Tensor, weights_CV: Tensor, goal_C: Tensor) -> Tensor:
    """Return the highest number such that the weights of the scores at or above it reach the goal.

    The result is -inf if the sum of all weights does not reach the goal. The search determines the number bit
    by bit. This works because floating-point numbers have the same order as their bits, read as integers.
    """
    kind = _BITS[scores_CV.dtype]
    weights_CV = weights_CV[:, : scores_CV.shape[1]]

    def number(key_C: Tensor) -> Tensor:
        """Convert an integer key to its float. Floats store negative numbers as sign and magnitude."""
        return torch.where(key_C < 0, key_C ^ torch.iinfo(kind).max, key_C).to(kind).view(scores_CV.dtype)

    high_C = torch.full_like(goal_C, torch.inf, dtype=scores_CV.dtype).view(kind).long()
    low_C = ~high_C
    for _ in range(torch.iinfo(kind).bits):
        middle_C = (low_C & high_C) + ((low_C ^ high_C) >> 1)  # the mean, without overflow
        kept_CV = torch.where(scores_CV >= number(middle_C)[:, None], weights_CV, 0.0)
        reached_C = kept_CV.sum(-1, dtype=torch.float64) >= goal_C
        low_C = torch.where(reached_C, middle_C, low_C)
        high_C = torch.where(reached_C, high_C, middle_C)
    return number(low_C)
