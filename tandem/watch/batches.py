"""Checks of a batch against what must hold of it whatever the policy wrote: rows that belong together, masks
that fit the log-probs, prompts and responses that begin and end where they should. Each counts the rows that
break a rule; the controller names the cause, see `tandem.watch.integrity`.

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
"""Prefix of what is counted here; what is nought does not go into the run folder."""
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>")
_FEWEST = 8
CERTAIN = -1e-3


def certain(rollout: RolloutConfig) -> float:
    """The log-prob of training, nats, below which a token was not the only one that sampling left to choose
    from, so that the rollout has a log-prob other than 0 for it. Where it left all, a token below `CERTAIN`
    was not certain."""
    if rollout.top_k == 1 or rollout.min_p > 0:
        return -math.inf
    return math.log(rollout.top_p) + CERTAIN


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of a vocabulary that have a meaning of their own.

    Attributes:
        begin: of a text; None where there is none.
        pad: that stands for nothing; None where there is none, or where it has a second meaning.
        ends: of a text or of a turn.
        stops: of these, at which the engine ends a response.
    """

    begin: int | None = None
    pad: int | None = None
    ends: frozenset[int] = frozenset()
    stops: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...]) -> SpecialTokens:
        """Those of a tokenizer. Of the tokens with which the usual chat templates end a turn or a text
        (`_TURN_ENDS`), those that its vocabulary has.

        Args:
            stops: at which responses end; with none, as with `ignore_eos`, no response is looked at.
        """
        known = tokenizer.get_vocab()
        ends = {known[name] for name in _TURN_ENDS if name in known} | {*stops}
        begin, pad = tokenizer.bos_token_id, tokenizer.pad_token_id
        return cls(begin, None if pad in ends or pad == begin else pad, frozenset(ends), frozenset(stops))


def add_checks(metrics: Metrics, batch: DataProto, special: SpecialTokens, certain: float) -> None:
    """Counts the samples that break a rule.

    - `mixed_groups`: samples of one uid that answer another prompt than its first.
    - `repeated`: samples of the same uid and number as another.
    - `foreign_scores`: samples whose score was given for other tokens.
    - `late_mask`: samples with a log-prob of the rollout outside the response mask.
    - `early_mask`: samples whose first token in the mask has none, while training finds it uncertain.
    - `two_begins`, `ended_prompts`, `padded_prompts`: prompts that begin twice, that end like a text or a
      turn, or hold padding.
    - `run_on`: responses that go on after a token that ends a text or a turn.
    - `advantage_correlation`: of rewards and mean advantages within groups.

    Args:
        batch: of a step, with its scores and advantages.
        certain: see the function of that name.
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
    """(T) int64: tokens of the mask in its sample up to and including each."""
    total_T = mask.values.long().cumsum(0)
    before_B = torch.cat([total_T.new_zeros(1), total_T])[mask.offsets[:-1]]
    return total_T - before_B[mask.row_ids()]


def _rows(of: Ragged, where_T: Tensor) -> int:
    """How many samples have a token there."""
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
    """(T) bool: whether a token has another behind it in its sample."""
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
    """Pearson's, of each sample's score less its group's mean and its mean advantage less the group's; None
    where fewer than `_FEWEST` samples differ from their group, or advantages do not."""
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
