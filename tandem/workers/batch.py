"""The worker for computations over a whole batch: KL in the reward, advantages, metrics and sample files.

These computations need all samples of a prompt together. So a single process does them, outside the
controller.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.algorithms.kl import FULL, PenalisedRewards, apply_kl_penalty, penalise
from tandem.algorithms.masked import explained_variance, segment_sum
from tandem.algorithms.registry import AdvantageSpec, advantage_estimator
from tandem.config.actor import ONE_REFERENCE, ActorConfig, reference_name
from tandem.config.algorithm import AlgorithmConfig
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.runtime import Dispatch, register
from tandem.watch.batches import CERTAIN, SpecialTokens, add_checks
from tandem.workers import combining, shaping
from tandem.workers.advantage_inputs import refuse_non_finite, reward_components
from tandem.workers.base import TimedWorker
from tandem.workers.correction import KEPT, WEIGHTS, Correction, correction_columns
from tandem.workers.loss_terms import configured_loss
from tandem.workers.reward import FAILED, failed


class BatchWorker(TimedWorker):
    """The worker that computes advantages, measures whole batches and writes sample files.

    Args:
        config: The resolved `algorithm` section.
        run: The run folder.
        actor: The actor's section, whose loss may select tokens over the whole batch.
        special: The special tokens that the checks of a batch look for; see `tandem.watch.batches`.
        certain: The threshold that the checks of a batch use; see `tandem.watch.batches`.
        references: A dict from the column of a reference policy's log-probs to the weight of this policy's
            KL.
    """

    stand_in = shaping.stand_in
    punish_overlong = shaping.punish_overlong
    group_spread = shaping.group_spread
    running_scores = combining.running_scores
    combine_scores = combining.combine_scores

    def __init__(
        self,
        config: AlgorithmConfig,
        run: RunFolder,
        actor: ActorConfig | None = None,
        special: SpecialTokens | None = None,
        certain: float = CERTAIN,
        references: Mapping[str, float] = ONE_REFERENCE,
    ) -> None:
        super().__init__(run, "batch")
        assert self.world_size == 1, "one process must have all samples of a group"
        self.config = config
        self.special, self.certain = special or SpecialTokens(), certain
        self.references = references
        self.spec: AdvantageSpec = advantage_estimator(config.adv_estimator)
        shared = {
            "gamma": config.gamma,
            "lam": config.lam,
            "norm_adv_by_std_in_grpo": config.norm_adv_by_std_in_grpo,
            "gdpo_reward_weights": config.gdpo_reward_weights,
        }
        self.options = self.spec.select_options(shared, config.adv_kwargs)
        self.correction = Correction(config.rollout_correction)
        self._loss, self._loss_options = configured_loss(actor or ActorConfig())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_advantages(self, batch: DataProto, kl_coef: float) -> DataProto:
        """Compute advantages for all response tokens.

        The result has `token_level_rewards`, `advantages` and `returns`, ragged fp32 (fp64 if a column is
        fp64), and the columns of the rollout correction. Rejected tokens also get advantages: the updates
        leave these tokens out, but their rewards still count for earlier tokens. If the policy loss treats
        some tokens separately, the result has `selected_tokens`, ragged bool.

        Args:
            batch: A batch with the columns that the estimator's signature names. For a KL penalty in the
                reward, the batch also needs `old_log_probs` and the references' log-probs, or `ref_kl` if the
                KL is exact.
            kl_coef: The coefficient of the KL penalty, in reward per nat. 0 leaves the reward unchanged.

        Raises:
            RewardError: A reward is not finite.
            NonFiniteError: Another column is not finite at a response token.
        """
        with self.timeline.phase("adv"):
            corrected = correction_columns(self.correction, batch, self.observed)
            batch = batch.union(DataProto(corrected))
            mask = batch.ragged("response_mask")
            of_kl = {"old_log_probs", "ref_kl", *self.references} if kl_coef else set()
            refuse_non_finite(batch, {"token_level_scores", *self.spec.columns, *of_kl})
            rewards_T = batch.ragged("token_level_scores").values.to(widest_float(batch))
            if kl_coef != 0:
                rewards_T = self._kl_penalised(batch, kl_coef).token_level_rewards.to(rewards_T.dtype)
            rewards = {"token_level_rewards": mask.with_values(rewards_T)}
            batch = batch.union(DataProto(rewards))
            found: dict[str, Ragged | Tensor] = {**corrected, **rewards}
            learns_B = ~self._without_signal(batch)
            if bool(learns_B.all()):
                return DataProto(found | self._estimated(batch))
            learns_T = learns_B[mask.row_ids()]
            for name, column in self._estimated(batch[learns_B]).items():  # the other samples are ignored
                values_T = torch.zeros(len(mask.values), dtype=column.dtype)
                values_T[learns_T] = column.values
                found[name] = mask.with_values(values_T)
            return DataProto(found)

    def _without_signal(self, batch: DataProto) -> Tensor:
        """Return (B) bool: true for the samples that give no learning signal.

        These are the samples that could not be scored. If the estimator compares the samples of a prompt, a
        sample also gives no signal if all other samples of the prompt could not be scored.
        """
        failed_B = failed(batch)
        if FAILED not in batch or "group" not in self.spec.columns:
            return failed_B
        group_B = group_ids(batch.non_tensor_batch["uid"])
        left_B = group_B.bincount(weights=(~failed_B).double())[group_B]
        return failed_B | ((left_B == 1) & (group_B.bincount()[group_B] > 1))

    def _estimated(self, batch: DataProto) -> dict[str, Ragged]:
        """Return `advantages`, `returns` and, if the loss selects tokens, `selected_tokens`."""
        mask, rewards_T = batch.ragged("response_mask"), batch.ragged("token_level_rewards").values
        if not len(batch):
            nothing = mask.with_values(rewards_T)
            chosen = {} if self._loss.selection is None else {"selected_tokens": mask}
            return {"advantages": nothing, "returns": nothing, **chosen}
        columns: dict[str, Any] = {
            **{name: c.values if isinstance(c, Ragged) else c for name, c in batch.batch.items()},
            "offsets": mask.offsets,
            "group": group_ids(batch.non_tensor_batch["uid"]),
        }
        if "reward_components" in self.spec.columns:
            extras, keys = list(batch.non_tensor_batch["reward_extra"]), self.config.gdpo_reward_keys
            if "score" in keys:
                scores = batch.dense("scores").tolist()
                extras = [{**extra, "score": score} for extra, score in zip(extras, scores, strict=True)]
            columns["reward_components"] = reward_components(extras, keys).to(rewards_T.dtype)
        columns.setdefault(WEIGHTS, torch.ones_like(rewards_T))
        out = self.spec(columns, **self.options)
        found = {"advantages": mask.with_values(out.advantages), "returns": mask.with_values(out.returns)}
        if self._loss.selection is not None:
            kept_T = batch.ragged(KEPT).values if KEPT in batch else mask.values
            known = columns | {"advantages": out.advantages, "response_mask": kept_T}
            found["selected_tokens"] = mask.with_values(self._loss.selection(known, self._loss_options))
        return found

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def left_out(self, batch: DataProto, truncated: bool) -> np.ndarray:
        """Return (B) bool: true for the samples that no update uses.

        Args:
            batch: A batch with `finish_reason` and `uid`, and with `reward_failed` if samples that could not
                be scored are left out.
            truncated: Whether responses that reached the maximum length are left out.
        """
        cut_B = torch.from_numpy(np.asarray(batch.non_tensor_batch["finish_reason"] == "length", dtype=bool))
        out: np.ndarray = (self._without_signal(batch) | cut_B & truncated).numpy()
        return out

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def reward_baselines(self, scores: DataProto) -> DataProto:
        """Return the total reward of each row of `scores`, as the column `reward_baselines` (B).

        The rows are separate responses to the prompts of the batch, in the same order.
        """
        return DataProto({"reward_baselines": scores.dense("scores")})

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def measure(self, batch: DataProto) -> Metrics:
        """Return metrics of rewards, lengths, advantages, values and KL to the reference.

        The metrics include the fraction of prompts whose responses all have the same score, and the explained
        variance of the critic.
        """
        with self.timeline.phase("measure"):
            mask = batch.ragged("response_mask")
            metrics = score_metrics(batch, "reward", "mean")
            if {"group", "token_level_rewards"} <= set(self.spec.columns):
                _add_groups(metrics, batch)
            _add_lengths(metrics, mask, batch.non_tensor_batch["finish_reason"])
            sources = Counter(batch.non_tensor_batch.get("data_source", ()))
            for source, count in sources.items() if len(sources) > 1 else ():
                metrics.add_mean(f"data/share/{source}", count, len(batch))
            measured = {"advantages": "advantages", "returns": "returns", "values": "critic/values"}
            for column, name in measured.items():
                if column in batch:
                    _add_range(metrics, name, batch.ragged(column).values[mask.values])
            if "reward_baselines" in batch:
                _add_range(metrics, "critic/baseline", batch.dense("reward_baselines"))
            rewards_B = segment_sum(batch.ragged("token_level_rewards").values, mask.offsets)
            metrics.add_mean("reward/after_kl", rewards_B.sum(), len(mask))
            if "values" in batch:
                values_T, returns_T = batch.ragged("values").values, batch.ragged("returns").values
                variance = explained_variance(values_T, returns_T, mask.values)
                metrics.add_mean("critic/explained_variance", variance, 1.0)
            if self.config.use_kl_in_reward:
                metrics.add_mean("actor/kl_in_reward", self._kl_penalised(batch, 0.0).kl, 1.0)
                for column in self.references if len(self.references) > 1 else ():
                    kl = self._kl_penalised(batch, 0.0, {column: 1.0}).kl
                    metrics.add_mean(f"actor/kl_in_reward/{reference_name(column)}", kl, 1.0)
            add_checks(metrics, batch, self.special, self.certain)
            return metrics

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def measure_validation(self, batch: DataProto) -> Metrics:
        """Return `val/accuracy` and `val/reward`, in total and per data source, and response lengths.

        A sample is correct if the reward function returns a true `acc`. If the function returns no `acc`, a
        sample is correct if its score is at least 1.
        """
        metrics = score_metrics(batch, "val", "reward")
        scores = batch.dense("scores").tolist()
        arrays = batch.non_tensor_batch
        for score, extra, source in zip(scores, arrays["reward_extra"], arrays["data_source"], strict=True):
            right = float(extra.get("acc", score >= 1))
            metrics.add_mean("val/accuracy", right, 1.0)
            metrics.add_mean(f"val/accuracy/{source}", right, 1.0)
        tokens = batch.ragged("response_mask").values.sum()
        metrics.add_mean("val/response_length", tokens, len(batch))
        return metrics

    def _kl_penalised(
        self, batch: DataProto, kl_coef: float, references: Mapping[str, float] | None = None
    ) -> PenalisedRewards:
        """Apply the KL penalty to the rewards.

        Args:
            batch: The batch.
            kl_coef: The coefficient of the KL penalty, in reward per nat.
            references: A dict from log-prob column to the weight of its KL. None means the config's weights.
        """
        references = references or self.references
        mask = batch.ragged("response_mask")
        scores_T = batch.ragged("token_level_scores").values
        if self.config.kl_penalty == FULL:
            kl_T = batch.ragged("ref_kl").values
            return penalise(scores_T, kl_T, mask.values, mask.offsets, kl_coef=kl_coef)
        return apply_kl_penalty(
            scores_T,
            batch.ragged("old_log_probs").values,
            [batch.ragged(column).values for column in references],
            mask.values,
            mask.offsets,
            kind=self.config.kl_penalty,
            kl_coef=kl_coef,
            weights=list(references.values()),
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def write_samples(self, step: int, batch: DataProto, *, part: str = "") -> None:
        """Write every sample with its per-token columns into the run folder.

        Args:
            step: The training step.
            batch: The samples.
            part: A name that distinguishes this file from other files of the same step.
        """
        with self.timeline.phase("write_samples"):
            self.run.write_samples(step, {**batch.batch, **batch.non_tensor_batch}, part=part)


def widest_float(batch: DataProto) -> torch.dtype:
    """Return the widest floating-point type among the per-token columns, at least fp32."""
    types = [column.values.dtype for column in batch.batch.values() if isinstance(column, Ragged)]
    floats = [dtype for dtype in types if dtype.is_floating_point]
    return functools.reduce(torch.promote_types, floats, torch.float32)


def group_ids(uids: np.ndarray) -> Tensor:
    """Return (B) int64: one number per uid, in the order of first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


def score_metrics(batch: DataProto, prefix: str, mean: str) -> Metrics:
    """Return metrics of the scores, over all samples and per data source.

    The metrics include the means of the other numbers that the reward function returned.
    """
    metrics = Metrics()
    scores_B, arrays = batch.dense("scores"), batch.non_tensor_batch
    extras, sources = arrays["reward_extra"], arrays["data_source"]
    for score, extra, source in zip(scores_B.tolist(), extras, sources, strict=True):
        metrics.add_mean(f"{prefix}/{mean}", score, 1.0)
        metrics.add_mean(f"{prefix}/{mean}/{source}", score, 1.0)
        for name, value in extra.items():
            metrics.add_mean(f"{prefix}/extra/{name}", value, 1.0)
    metrics.add_max(f"{prefix}/max", scores_B.max())
    metrics.add_min(f"{prefix}/min", scores_B.min())
    return metrics


def _add_groups(metrics: Metrics, batch: DataProto) -> None:
    """Add the fraction of prompts whose responses all have the same score to the metrics.

    Prompts with a single response are ignored.
    """
    groups: dict[str, set[float]] = {}
    sizes = Counter(batch.non_tensor_batch["uid"])
    for uid, score in zip(batch.non_tensor_batch["uid"], batch.dense("scores").tolist(), strict=True):
        if sizes[uid] > 1:
            groups.setdefault(uid, set()).add(score)
    alike = sum(len(scores) == 1 for scores in groups.values())
    metrics.add_mean("reward/zero_std_share", float(alike), float(len(groups)))


def _add_lengths(metrics: Metrics, mask: Ragged, finish_reasons: np.ndarray) -> None:
    tokens_B = segment_sum(mask.values.long(), mask.offsets)
    prompts_B = mask.lengths - tokens_B
    metrics.add_sum("tokens/response", tokens_B.sum())
    metrics.add_sum("tokens/total", len(mask.values))
    _add_range(metrics, "response_length", tokens_B)
    metrics.add_mean("response_length/clip_ratio", float((finish_reasons == "length").sum()), len(mask))
    metrics.add_mean("prompt_length/mean", prompts_B.sum(), len(mask))
    metrics.add_max("prompt_length/max", prompts_B.max())


def _add_range(metrics: Metrics, name: str, values: Tensor) -> None:
    metrics.add_mean(f"{name}/mean", values.sum(), len(values))
    if len(values):
        metrics.add_max(f"{name}/max", values.max())
        metrics.add_min(f"{name}/min", values.min())
