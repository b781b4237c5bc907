"""Methods of the batch's worker that choose the samples to learn from, and that punish their length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tandem.algorithms.dapo import groups_with_spread, soft_overlong_punishment
from tandem.algorithms.masked import segment_sum
from tandem.errors import RewardError
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, register
from tandem.workers.base import TimedWorker
from tandem.workers.reward import at_last_token, failed

SCORE = "score"
"""In `reward_extra`: what the reward said before the punishment of long responses."""


class Spread(NamedTuple):
    """Facts about the prompts of a generation batch.

    Attributes:
        differs: (P) bool, whether the responses to a prompt differ in the metric.
        reward: mean reward of all responses.
    """

    differs: np.ndarray
    reward: float


@register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
def stand_in(worker: TimedWorker, batch: DataProto) -> DataProto:
    """The scores where those that failed are the mean of the others' to the same prompt, or 0 where there
    are none: they say nothing of the prompt, nor of the batch.

    Args:
        batch: `response_mask`, `uid`, and what a reward worker returns.

    Returns:
        `scores`, `token_level_scores`.
    """
    failed_B, scores_B = failed(batch), batch.dense("scores").clone()
    mask, scored = batch.ragged("response_mask"), batch.ragged("token_level_scores")
    uids = batch.non_tensor_batch["uid"]
    for row in failed_B.nonzero().flatten().tolist():
        others_B = torch.from_numpy(uids == uids[row]) & ~failed_B
        scores_B[row] = scores_B[others_B].mean() if others_B.any() else 0.0
    added = at_last_token(scores_B - batch.dense("scores"), mask).values
    return DataProto({"scores": scores_B, "token_level_scores": scored.with_values(scored.values + added)})


@register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
def punish_overlong(
    worker: TimedWorker, batch: DataProto, max_length: int, buffer: int, penalty_factor: float, log: bool
) -> DataProto:
    """The scores after the punishment of long responses, which is added at the last response token.

    Args:
        batch: `response_mask` and what a reward worker returns.
        max_length, buffer, penalty_factor: see `soft_overlong_punishment`.
        log: also say the punishment, `overlong_reward`, and whether there is one, `overlong`.

    Returns:
        what the reward worker returned, with other `scores` and `token_level_scores`; `reward_extra` also
        holds the `score` before.
    """
    with worker.timeline.phase("overlong"):
        mask, scored = batch.ragged("response_mask"), batch.ragged("token_level_scores")
        scores_B = batch.dense("scores")
        lengths_B = segment_sum(mask.values, mask.offsets)
        punishment_B = soft_overlong_punishment(
            lengths_B, max_length=max_length, buffer=buffer, penalty_factor=penalty_factor
        ).to(scores_B.dtype)
        extras = []
        for extra, score, taken in zip(
            batch.non_tensor_batch["reward_extra"], scores_B.tolist(), punishment_B.tolist(), strict=True
        ):
            told = {"overlong_reward": taken, "overlong": float(taken < 0)} if log else {}
            extras.append({**extra, SCORE: score, **told})
        added = at_last_token(punishment_B, mask).values.to(scored.values.dtype)
        found = {name: column for name, column in batch.batch.items() if name != "response_mask"}
        found["scores"] = scores_B + punishment_B
        found["token_level_scores"] = scored.with_values(scored.values + added)
        return DataProto(found, {**batch.non_tensor_batch, "reward_extra": extras})


@register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
def group_spread(worker: TimedWorker, batch: DataProto, n: int, metric: str) -> Spread:
    """Tells which prompts' responses differ.

    Args:
        batch: `scores` and `reward_extra`, prompt by prompt, n rows each; `reward_failed`, where samples
            whose score failed are left out: the others are compared as if these were not there.
        metric: see `algorithm.filter_groups.metric`.

    Raises:
        RewardError: the reward function does not return that number, or it is not finite.
    """
    scores_B = batch.dense("scores")
    counts_B = ~failed(batch)
    values_B = torch.full((len(batch),), -torch.inf, dtype=torch.float64)
    values_B[counts_B] = metric_values(batch[counts_B], metric)
    bad_B = counts_B & ~torch.isfinite(values_B)
    if bool(bad_B.any()):
        raise RewardError(
            "rewards are not finite",
            field=metric,
            got=f"{int(bad_B.sum())} samples, the first is number {int(bad_B.nonzero()[0])}",
            remedy="let the reward return a finite number",
        )
    greatest_B = values_B.view(-1, n).amax(1).repeat_interleave(n)
    values_B = torch.where(counts_B, values_B, greatest_B)
    return Spread(groups_with_spread(values_B, n).numpy(), float(scores_B.double().mean()))


def metric_values(batch: DataProto, metric: str) -> torch.Tensor:
    """(B) float64: a number of each response. "acc" is the score where the reward says nothing else.

    Raises:
        RewardError: the reward function does not return that number.
    """
    scores = batch.dense("scores").double()
    if metric in ("reward", "seq_reward", "seq_final_reward"):
        return scores
    values = []
    for row, (extra, score) in enumerate(
        zip(batch.non_tensor_batch["reward_extra"], scores.tolist(), strict=True)
    ):
        unpunished = extra.get(SCORE, score)
        if metric == SCORE or metric in extra:
            values.append(extra.get(metric, unpunished))
        elif metric == "acc":
            values.append(unpunished)
        else:
            raise RewardError(
                "the reward does not return the number that prompts are filtered by",
                field="algorithm.filter_groups.metric",
                got=f"{metric}; sample {row} has {', '.join(sorted(extra)) or 'its score only'}",
                expected="acc, score, reward, seq_reward, seq_final_reward, or a number that it returns",
                remedy=f"return it, as {{'score': …, '{metric}': …}}, or choose another metric",
            )
    return torch.tensor(values, dtype=torch.float64)
