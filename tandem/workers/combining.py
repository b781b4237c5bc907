"""Methods of the batch worker that combine several scores per sample into one reward.

Each score comes from a part of the reward: a reward function or a reward model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.errors import RewardError
from tandem.protocol import DataProto, Ragged
from tandem.rewards.combination import Combination, Part, Running
from tandem.runtime import Dispatch, register
from tandem.workers.base import TimedWorker
from tandem.workers.reward import at_last_token, failed, scored_batch


@register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
def running_scores(
    worker: TimedWorker, before: Mapping[str, Running], combination: Combination, *scored_parts: DataProto
) -> dict[str, Running]:
    """Return the running statistics of the normalized scores, updated with a new batch.

    Args:
        worker: The worker.
        before: A dict from part to the statistics of earlier batches.
        combination: How the parts are combined.
        scored_parts: The result of each part's worker.
    """
    return {
        part.name: before.get(part.name, Running()).after(scored.dense("scores")[~failed(scored)].tolist())
        for part, scored in zip(combination.parts, scored_parts, strict=True)
        if part.normalize
    }


@register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
def combine_scores(
    worker: TimedWorker,
    batch: DataProto,
    running: Mapping[str, Running],
    combination: Combination,
    *scored_parts: DataProto,
) -> DataProto:
    """Combine the scores of several parts into one reward.

    Args:
        worker: The worker.
        batch: A batch with `response_mask` and `index`.
        running: A dict from part to the statistics that normalize its scores.
        combination: How the parts are combined.
        scored_parts: The result of each part's worker.

    Returns:
        The columns that a single reward worker returns (see `RewardWorker.compute_rewards`). If samples that
        could not be scored are left out, also `reward_failed`.

    Raises:
        RewardError: A sample could not be scored, and `reward.on_error` is raise.
    """
    with worker.timeline.phase("combine"):
        mask = batch.ragged("response_mask")
        scores_B, tokens_T = torch.zeros(len(mask)), torch.zeros(len(mask.values))
        failed_B = torch.zeros(len(mask), dtype=torch.bool)
        rows = [_SampleScores() for _ in range(len(mask))]
        for part, scored in zip(combination.parts, scored_parts, strict=True):
            failed_B |= _failures(worker, part, scored, batch, combination.on_error)
            counted_B, counted = _counted(worker, part, scored, running, mask)
            scores_B += part.weight * counted_B
            tokens_T += part.weight * counted.values
            _add_part(rows, part, scored, counted_B, combination)
        if combination.function is not None:
            index = batch.non_tensor_batch["index"]
            made = [
                0.0 if lost else combination.made(row.by_name, f"row {number} of the data")
                for row, lost, number in zip(rows, failed_B.tolist(), index, strict=True)
            ]
            scores_B = torch.tensor(made, dtype=torch.float32)
            tokens_T = at_last_token(scores_B, mask).values
        asked_B = failed_B if combination.on_error == "drop" else None
        extras, whys = [row.extra for row in rows], ["; ".join(row.whys) for row in rows]
        texts = scored_parts[0].non_tensor_batch["response_text"].tolist()
        return scored_batch(scores_B, mask.with_values(tokens_T), asked_B, extras, whys, texts)


def _counted(
    worker: TimedWorker, part: Part, scored: DataProto, running: Mapping[str, Running], mask: Ragged
) -> tuple[Tensor, Ragged]:
    """Return a part's scores per sample and per token, normalized if the part's config sets it."""
    scores_B = scored.dense("scores")
    if not part.normalize:
        return scores_B, scored.ragged("token_level_scores")
    statistics = running.get(part.name, Running())
    worker.observed.add_mean(f"reward/running_mean/{part.name}", statistics.mean, 1.0)
    worker.observed.add_mean(f"reward/running_std/{part.name}", statistics.deviation, 1.0)
    counted_B = torch.tensor([statistics.normalised(score) for score in scores_B.tolist()])
    counted_B = torch.where(failed(scored), 0.0, counted_B)
    return counted_B, at_last_token(counted_B, mask)


def _failures(worker: TimedWorker, part: Part, scored: DataProto, batch: DataProto, on_error: str) -> Tensor:
    """Return which samples a part could not score, and show the user a model's first failure.

    Raises:
        RewardError: A model could not score a sample, and `reward.on_error` is raise.
    """
    failed_B = failed(scored)
    if part.functions is not None:  # reward functions report failures in their worker
        return failed_B
    if on_error != "raise":
        worker.observed.add_mean(f"reward/failed/{part.name}", failed_B.sum(), len(failed_B))
    for row in failed_B.nonzero().flatten().tolist()[:1]:
        error = RewardError(
            f"the reward model {part.name} could not score a response",
            field=f"sample {row}, row {batch.non_tensor_batch['index'][row]} of the data",
            got=scored.non_tensor_batch["reward_why"][row],
            expected="a sequence that it can read",
            remedy="set reward.on_error=zero to count such scores as 0, or drop to leave out the samples",
        )
        if on_error == "raise":
            raise error
        worker.say_once(part.name, f"a score failed (reward.on_error={on_error}):\n{error}")
    return failed_B


@dataclass(slots=True)
class _SampleScores:
    """The results of all parts for one sample.

    Attributes:
        by_name: A dict from part to score, the argument of the user's combining function.
        extra: Further numbers for metrics and sample files.
        whys: Explanations of the scores for sample files.
    """

    by_name: dict[str, float] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)
    whys: list[str] = field(default_factory=list)


def _add_part(
    rows: Sequence[_SampleScores], part: Part, scored: DataProto, counted_B: Tensor, combination: Combination
) -> None:
    """Add a part's results to each sample: raw score, final score, other numbers and explanation."""
    arrays = scored.non_tensor_batch
    whys = arrays.get("reward_why", [""] * len(rows))
    numbers = scored.dense("scores").tolist(), counted_B.tolist()
    for row, score, counts, extra, why in zip(rows, *numbers, arrays["reward_extra"], whys, strict=True):
        apart = {name: extra[name] for name in part.functions or () if name in extra}
        row.by_name |= apart or {part.name: counts}
        row.extra |= {(f"{part.name}/{k}" if k in combination.models else k): v for k, v in extra.items()}
        if combination.tells and not part.functions:
            row.extra[part.name] = score
            if part.normalize:
                row.extra[f"{part.name}/normalized"] = counts
            why = f"{part.name}: {score:.4g}" + (f", {why}" if why else "")
        row.whys += [why] if why else []
