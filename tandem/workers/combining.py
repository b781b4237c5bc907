"""Several parts' scores as one reward, over a whole batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.errors import RewardError
from tandem.protocol import DataProto, Ragged
from tandem.rewards.combination import Combination, Part, Running
from tandem.runtime import Dispatch, register
from tandem.workers.reward import at_last_token
from tandem.workers.shaping import ShapingWorker

FAILED = "reward_failed"


class CombiningWorker(ShapingWorker):
    """Methods of the batch's worker that make the reward out of what reward models and functions say."""

    _told = False

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def running_scores(
        self, before: Mapping[str, Running], combination: Combination, *said: DataProto
    ) -> dict[str, Running]:
        """The statistics of the scores that are normalised, with those of a batch.

        Args:
            before: of earlier batches, by part.
            said: what each part's worker returned.
        """
        return {
            part.name: before.get(part.name, Running()).after(
                scored.dense("scores")[~_failed(scored)].tolist()
            )
            for part, scored in zip(combination.parts, said, strict=True)
            if part.normalize
        }

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def combine_scores(
        self, batch: DataProto, running: Mapping[str, Running], combination: Combination, *said: DataProto
    ) -> DataProto:
        """One reward of several parts' scores.

        Args:
            batch: `response_mask` and `index`.
            running: the statistics by which scores are normalised, by part.
            said: what each part's worker returned.

        Returns:
            the same columns as one reward worker's; where failed scores leave samples out, `reward_failed`.

        Raises:
            RewardError: a score has failed, and `reward.on_error` is raise.
        """
        with self.timeline.phase("combine"):
            return self._combined(batch, running, combination, said)

    def _combined(
        self,
        batch: DataProto,
        running: Mapping[str, Running],
        combination: Combination,
        said: tuple[DataProto, ...],
    ) -> DataProto:
        mask = batch.ragged("response_mask")
        scores_B, tokens_T = torch.zeros(len(mask)), torch.zeros(len(mask.values))
        failed_B = torch.zeros(len(mask), dtype=torch.bool)
        extras: list[dict[str, float]] = [{} for _ in range(len(mask))]
        whys: list[list[str]] = [[] for _ in range(len(mask))]
        by_name: list[dict[str, float]] = [{} for _ in range(len(mask))]
        models = {part.name for part in combination.parts if part.functions is None}
        for part, scored in zip(combination.parts, said, strict=True):
            failed_B |= self._failures(part, scored, batch, combination)
            counted_B, counted = self._counted(part, scored, running, mask)
            scores_B += part.weight * counted_B
            tokens_T += part.weight * counted.values
            told = zip(
                scored.dense("scores").tolist(),
                counted_B.tolist(),
                scored.non_tensor_batch["reward_extra"],
                scored.non_tensor_batch.get("reward_why", [""] * len(mask)),
                strict=True,
            )
            for row, (score, counts, extra, why) in enumerate(told):
                said_apart = part.functions or ()
                by_name[row] |= {name: extra[name] for name in said_apart if name in extra} or {
                    part.name: counts
                }
                extras[row] |= {(f"{part.name}/{k}" if k in models else k): v for k, v in extra.items()}
                if combination.tells and not said_apart:
                    extras[row][part.name] = score
                    extras[row] |= {f"{part.name}/normalized": counts} if part.normalize else {}
                    why = f"{part.name}: {score:.4g}" + (f", {why}" if why else "")
                whys[row] += [why] if why else []
        if combination.function is not None:
            scores_B = self._made(combination, by_name, failed_B, batch, whys)
            tokens_T = at_last_token(scores_B, mask).values
        found: dict[str, Tensor | Ragged] = {
            "scores": scores_B,
            "token_level_scores": mask.with_values(tokens_T),
        }
        if combination.on_error == "drop":
            found[FAILED] = failed_B
        texts = said[0].non_tensor_batch["response_text"]
        joined = ["; ".join(why) for why in whys]
        return DataProto(found, {"reward_extra": extras, "reward_why": joined, "response_text": texts})

    def _counted(
        self, part: Part, scored: DataProto, running: Mapping[str, Running], mask: Ragged
    ) -> tuple[Tensor, Ragged]:
        """A part's scores as they count, of samples and of tokens."""
        scores_B = scored.dense("scores")
        if not part.normalize:
            return scores_B, scored.ragged("token_level_scores")
        statistics = running.get(part.name, Running())
        self.observed.add_mean(f"reward/running_mean/{part.name}", statistics.mean, 1.0)
        self.observed.add_mean(f"reward/running_std/{part.name}", statistics.deviation, 1.0)
        counted_B = torch.tensor([statistics.normalised(score) for score in scores_B.tolist()])
        counted_B = torch.where(_failed(scored), 0.0, counted_B)
        return counted_B, at_last_token(counted_B, mask)

    def _failures(self, part: Part, scored: DataProto, batch: DataProto, combination: Combination) -> Tensor:
        """The samples that a part could not score; of a model the user hears of the first."""
        failed_B = _failed(scored)
        if part.functions is not None:  # theirs are told by their own worker
            return failed_B
        rows = failed_B.nonzero().flatten().tolist()
        if combination.on_error != "raise":
            self.observed.add_mean(f"reward/failed/{part.name}", len(rows), len(failed_B))
        for row in rows:
            self._fail(
                RewardError(
                    f"the reward model {part.name} could not score a response",
                    field=_sample(batch, row),
                    got=scored.non_tensor_batch["reward_why"][row],
                    expected="a sequence that it can read",
                    remedy="let it count as nothing: reward.on_error=zero, or drop",
                ),
                combination,
            )
        return failed_B

    def _made(
        self,
        combination: Combination,
        by_name: list[dict[str, float]],
        failed_B: Tensor,
        batch: DataProto,
        whys: list[list[str]],
    ) -> Tensor:
        """(B): what the user's function makes of the scores; 0 where it fails."""
        made = []
        for row, scores in enumerate(by_name):
            try:
                made.append(0.0 if failed_B[row] else combination.made(scores, _sample(batch, row)))
            except RewardError as error:
                self._fail(error, combination)
                failed_B[row] = True
                made.append(0.0)
                whys[row].append(f"failed: {str(error).splitlines()[0]}")
        return torch.tensor(made, dtype=torch.float32)

    def _fail(self, error: RewardError, combination: Combination) -> None:
        """
        Raises:
            RewardError: the given one, where `reward.on_error` is raise.
        """
        if combination.on_error == "raise":
            raise error
        if not self._told:
            self._told = True
            self.say(f"a score failed (reward.on_error={combination.on_error}):\n{error}")


def _failed(scored: DataProto) -> Tensor:
    """(B) bool."""
    if FAILED in scored:
        return scored.dense(FAILED)
    return torch.zeros(len(scored), dtype=torch.bool)


def _sample(batch: DataProto, row: int) -> str:
    return f"sample {row}, row {batch.non_tensor_batch['index'][row]} of the data"
