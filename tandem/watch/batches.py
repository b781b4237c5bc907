"""Check a batch against rules that must hold for all responses.

For example: rows belong together, masks fit the log-probs, prompts and responses start and end correctly.
Each check counts the rows that break a rule. The controller names the cause; see `tandem.watch.integrity`.

Shapes: B samples, T their tokens, flat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandem.algorithms.masked import segment_sum
from tandem.config.rollout import RolloutConfig
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged
from tandem.watch.gap import SAMPLED, SCORED, fingerprint

CHECK = "trust/"
"""Prefix of the counts of rows that break a rule. Counts of zero are not written to the run folder."""
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>")
_FEWEST = 8
CERTAIN = -1e-3


def certain(rollout: RolloutConfig) -> float:
    """Return the training log-prob, in nats, below which a token was not the only possible choice.

    Sampling settings such as top_p can leave a token as the only choice; its rollout log-prob is then 0. A
    token below this value had alternatives, so its rollout log-prob must differ from 0. If the settings
    exclude no token, the value is `CERTAIN`. With top_k=1 or min_p, any token can be the only choice, and the
    value is -inf.
    """
    if rollout.top_k == 1 or rollout.min_p > 0:
        return -math.inf
    return math.log(rollout.top_p) + CERTAIN


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of special tokens: begin, padding and end tokens.

    Attributes:
        begin: the begin token; None if the vocabulary has no begin token.
        pad: the padding token; None if the vocabulary has no padding token, or if the token has a second
            meaning.
        ends: the tokens that end a text or a turn.
        stops: the tokens out of `ends` at which the engine ends a response.
    """

    begin: int | None = None
    pad: int | None = None
    ends: frozenset[int] = frozenset()
    stops: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]) -> SpecialTokens:
        """Return the special tokens of a tokenizer.

        `ends` includes the tokens of the vocabulary with which common chat templates end a turn or a text
        (`_TURN_ENDS`).

        Args:
            tokenizer: the tokenizer.
            stops: the tokens at which responses end. If empty, as with `ignore_eos`, responses are not
                checked.
        """
        known = tokenizer.get_vocab()
        ends = {known[name] for name in _TURN_ENDS if name in known} | {*stops}
        begin, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
        return cls(begin, None if pad in ends or pad == begin else pad, frozenset(ends), frozenset(stops))


def add_checks(metrics: Metrics, batch: DataProto, special: SpecialTokens, certain: float) -> None:
    """Add the number of samples that break each rule to the metrics.

    - `mixed_groups`: samples that answer another prompt than the first sample with their uid.
    - `repeated`: samples with the same uid and sample number as another sample.
    - `foreign_scores`: samples whose score was computed for other tokens.
    - `late_mask`: samples with a rollout log-prob outside the response mask.
    - `early_mask`: samples whose first token in the mask has no rollout log-prob, although it was not
      certain.
    - `two_begins`, `ended_prompts`, `padded_prompts`: prompts with two begin tokens, prompts that end like a
      text or a turn, and prompts that contain padding.
    - `run_on`: responses that continue after a token that ends a text or a turn.
    - `advantage_correlation`: the correlation of rewards and mean advantages within groups.

    Args:
        metrics: the metrics to add to.
        batch: the batch of a step, with its scores and advantages.
        special: the special tokens.
        certain: the result of the function `certain`.
    """
    tokens, mask = batch.ragged("tokens"), batch.ragged("response_mask")
    prompt_T = _counted(mask) == 0
    names = zip(batch.non_tensor_batch["uid"], batch.non_tensor_batch["sample"], strict=True)
    found = {
        "repeated": len(batch) - len(set(names)),
        "mixed_groups": _mixed_groups(batch, prompt_T),
        **_of_prompts(tokens, prompt_T, special),
        "run_on": _run_on(tokens, mask, special),
    }
    if SCORED in batch:
        found["foreign_scores"] = int((batch.dense(SCORED) != fingerprint(tokens)).sum())
    if SAMPLED in batch:
        sampled_T = batch.ragged(SAMPLED).values
        found["late_mask"] = _rows(mask, ~mask.values & (sampled_T != 0))
        if "old_log_probs" in batch:
            first_T = mask.values & (_counted(mask) == 1)
            uncertain_T = batch.ragged("old_log_probs").values < certain
            found["early_mask"] = _rows(mask, first_T & (sampled_T == 0) & uncertain_T)
    for name, count in found.items():
        metrics.add_sum(f"{CHECK}{name}", float(count))
    correlation = _advantage_correlation(batch, mask)
    if correlation is not None:
        metrics.add_mean(f"{CHECK}advantage_correlation", correlation, 1.0)


def _counted(mask: Ragged) -> Tensor:
    """Return (T) int64: for each token, the number of mask tokens in its sample so far, including itself."""
    total_T = mask.values.long().cumsum(0)
    before_B = torch.cat([total_T.new_zeros(1), total_T])[mask.offsets[:-1]]
    return total_T - before_B[mask.row_ids()]


def _rows(of: Ragged, where_T: Tensor) -> int:
    """Return the number of samples in which any token is true."""
    return int((segment_sum(where_T.long(), of.offsets) > 0).sum())


def _mixed_groups(batch: DataProto, prompt_T: Tensor) -> int:
    tokens = batch.ragged("tokens")
    weighted_T = torch.where(prompt_T, (tokens.positions() + 1) * (tokens.values + 1), 0)
    prompts_B = segment_sum(weighted_T, tokens.offsets).numpy()
    _, first, group = np.unique(
        batch.non_tensor_batch["uid"].astype(str), return_index=True, return_inverse=True
    )
    return int((prompts_B != prompts_B[first][group]).sum())


def _of_prompts(tokens: Ragged, prompt_T: Tensor, special: SpecialTokens) -> dict[str, int]:
    ids_T, places_T = tokens.values, tokens.positions()
    following_T = torch.cat([prompt_T[1:], prompt_T.new_zeros(1)]) & _has_next(tokens)
    last_T = prompt_T & ~following_T
    found = {"ended_prompts": _rows(tokens, last_T & _is_any(ids_T, special.ends))}
    if special.begin is not None:
        begins_T = prompt_T & (ids_T == special.begin) & (places_T < 2)
        found["two_begins"] = int((segment_sum(begins_T.long(), tokens.offsets) == 2).sum())
    if special.pad is not None:
        found["padded_prompts"] = _rows(tokens, prompt_T & (ids_T == special.pad))
    return found


def _has_next(tokens: Ragged) -> Tensor:
    """Return (T) bool: whether a token is followed by another token of its sample."""
    has_T = torch.ones(len(tokens.values), dtype=torch.bool)
    has_T[(tokens.offsets[1:] - 1)[tokens.lengths > 0]] = False
    return has_T


def _run_on(tokens: Ragged, mask: Ragged, special: SpecialTokens) -> int:
    if not special.stops:
        return 0
    goes_on_T = torch.cat([mask.values[1:], mask.values.new_zeros(1)]) & _has_next(tokens)
    return _rows(tokens, mask.values & goes_on_T & _is_any(tokens.values, special.ends - special.stops))


def _is_any(ids_T: Tensor, wanted: frozenset[int]) -> Tensor:
    return torch.isin(ids_T, torch.tensor(sorted(wanted), dtype=ids_T.dtype))


def _advantage_correlation(batch: DataProto, mask: Ragged) -> float | None:
    """Return Pearson's correlation of the samples' scores and mean advantages, both relative to their group.

    The result is None if fewer than `_FEWEST` samples differ from the mean of their group, or if all
    advantages equal the mean of their group.
    """
    _, group = np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)
    tokens_B = segment_sum(mask.values.double(), mask.offsets).clamp(min=1)
    advantages_T = torch.where(mask.values, batch.ragged("advantages").values.double(), 0.0)
    scores_B = _centred(batch.dense("scores").double(), torch.from_numpy(group))
    means_B = _centred(segment_sum(advantages_T, mask.offsets) / tokens_B, torch.from_numpy(group))
    if int((scores_B.abs() > 1e-9).sum()) < _FEWEST or not bool((means_B.abs() > 1e-9).any()):
        return None
    return float(torch.nn.functional.cosine_similarity(scores_B, means_B, dim=0))


def _centred(values_B: Tensor, group_B: Tensor) -> Tensor:
    sums = torch.zeros(int(group_B.max()) + 1, dtype=torch.float64).index_add(0, group_B, values_B)
    return values_B - (sums / torch.bincount(group_B))[group_B]
