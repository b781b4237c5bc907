"""Methods of the batch worker that select samples for training and penalize long responses."""

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
"""The key of `reward_extra` for the reward before the penalty on long responses."""


class Spread(NamedTuple):
    """The result of `group_spread` for the prompts of a generation batch.

    Attributes:
        differs: (P) bool, true for each prompt whose responses have different values of the metric.
        reward: The mean reward of all responses.
    """

    differs: np.ndarray
    reward: float


@register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
def stand_in(worker: TimedWorker, batch: DataProto) -> DataProto:
    """Replace failed scores by neutral values.

    A failed score becomes the mean score of the other responses to the same prompt, or 0 if no response to
    the prompt has a score. So a replaced score does not change the mean of its prompt.

    Args:
        worker: The worker.
        batch: A batch with `response_mask`, `uid`, and the columns that a reward worker returns.

    Returns:
        The columns `scores` and `token_level_scores`.
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
    """Add the penalty on long responses to the scores, at the last response token.

    Args:
        worker: The worker.
        batch: A batch with `response_mask` and the columns that a reward worker returns.
        max_length: See `soft_overlong_punishment`.
        buffer: See `soft_overlong_punishment`.
        penalty_factor: See `soft_overlong_punishment`.
        log: Whether to add `overlong_reward` (the penalty) and `overlong` (whether there is a penalty) to
            `reward_extra`.

    Returns:
        The columns of the reward worker with new `scores` and `token_level_scores`. `reward_extra` also has
        the `score` before the penalty.
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
            length_numbers = {"overlong_reward": taken, "overlong": float(taken < 0)} if log else {}
            extras.append({**extra, SCORE: score, **length_numbers})
        added = at_last_token(punishment_B, mask).values.to(scored.values.dtype)
        found = {name: column for name, column in batch.batch.items() if name != "response_mask"}
        found["scores"] = scores_B + punishment_B
        found["token_level_scores"] = scored.with_values(scored.values + added)
        return DataProto(found, {**batch.non_tensor_batch, "reward_extra": extras})


@register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
def group_spread(worker: TimedWorker, batch: DataProto, n: int, metric: str) -> Spread:
    """Find the prompts whose responses have different values of a metric.

    Args:
        worker: The worker.
        batch: A batch with `scores` and `reward_extra`, ordered by prompt, with n rows per prompt. If it has
            `reward_failed`, samples that could not be scored are ignored.
        n: The number of responses per prompt.
        metric: The name of the metric; see the config key `algorithm.filter_groups.metric`.

    Raises:
        RewardError: The reward function does not return the metric, or a value is not finite.
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
    """Return the value of the metric for each response, (B) float64.

    If the metric is "acc" and the reward function returns no `acc`, the score is used.

    Raises:
        RewardError: The reward function does not return the metric.
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
                expected="acc, score, reward, seq_reward, seq_final_reward, or a number of the reward",
                remedy=f"return it, as {{'score': …, '{metric}': …}}, or choose another metric",
            )
    return torch.tensor(values, dtype=torch.float64)
