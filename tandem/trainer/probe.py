"""Estimate, before training, from which fraction of its prompts a run can learn.

A few of the run's prompts are answered and scored in the same way as in the first training step. From the
responses, `report` estimates fractions, lengths and speed for all prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.algorithms.dapo import groups_with_spread
from tandem.algorithms.evaluation import Floats, estimate
from tandem.algorithms.masked import segment_sum
from tandem.config.dynamic_sampling import SamplerConfig
from tandem.config.root import TrainConfig
from tandem.config.tables import READS_COMPONENTS, needs
from tandem.lifetime import scratch_folder
from tandem.memory.levers import with_values
from tandem.observability.progress import Progress
from tandem.protocol import DataProto
from tandem.runtime import BatchFuture
from tandem.trainer.assembly import build_ppo
from tandem.trainer.control import controlled, shared_place
from tandem.trainer.launch import plain_errors
from tandem.trainer.perf import offered, take_observed, take_timings
from tandem.trainer.ppo import PPOTrainer
from tandem.workers.advantage_inputs import reward_components
from tandem.workers.shaping import SCORE, metric_values

_CONFIDENCE = 0.95
_RESAMPLES = 2000
_QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99}
_FAILURES = ("failed", "timeouts", "died", "retried")


@dataclass(frozen=True, slots=True)
class Seen:
    """The outcome of a probe: G groups of n responses.

    Attributes:
        prompts: (G) The number of tokens of each prompt.
        responses: (G, n) The number of tokens of each response.
        cut: (G, n) bool. Whether the response was cut at the length limit.
        right: (G, n) bool. Whether the response is correct.
        rewards: (G, n) The rewards that training would use.
        teaches: (G) bool. Whether training can learn from the group; see `teaching`.
        kept: (G) bool. Whether dynamic sampling would keep the group; all True without dynamic sampling.
        batches: For each batch: the number of groups, the generation time and the scoring time, in seconds.
        calls: The seconds of each call of a reward function for one response; empty if the scores come from
            models.
        failures: The fraction of failed scores, and the counts of timeouts, dead processes and retries.
    """

    prompts: NDArray[np.int64]
    responses: NDArray[np.int64]
    cut: NDArray[np.bool_]
    right: NDArray[np.bool_]
    rewards: Floats
    teaches: NDArray[np.bool_]
    kept: NDArray[np.bool_]
    batches: list[tuple[int, float, float]]
    calls: list[float]
    failures: dict[str, float]


def run_probe(config: TrainConfig, *, groups: int, limit_s: float, say: Callable[[str], None]) -> Seen:
    """Answer and score prompts of a run with the run's model, rollout engine and reward.

    The prompts are drawn at random with the run's seed. The run folder is temporary. Models that only
    training uses (critic, references) are not loaded.

    Args:
        config: The config of the run.
        groups: The number of prompts. The data or the time limit may allow fewer.
        limit_s: The limit of the sampling time, in seconds. The first few groups are always answered, and
            their speed determines how many groups fit into the limit.
        say: Prints a sentence for the user.

    Raises:
        TandemError: The run cannot be built, or a sample cannot be generated.
    """
    changes = {
        "data.shuffle": True,
        "data.sampler": SamplerConfig(),
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "algorithm.adv_kwargs": {},
        "algorithm.use_kl_in_reward": False,
        "actor_rollout_ref.actor.use_kl_loss": False,
        # a failed score is counted, and its sample is left out
        "reward.on_error": "drop" if config.reward.on_error == "raise" else config.reward.on_error,
        "trainer.worst_batch_first": False,
    }
    with scratch_folder("probe", shared_place(config)) as folder, plain_errors():
        trainer = build_ppo(with_values(controlled(config, folder / "run"), changes), say=say)
        try:
            return _seen(trainer, config, groups, limit_s)
        finally:
            trainer.shutdown()


def _seen(trainer: PPOTrainer, config: TrainConfig, groups: int, limit_s: float) -> Seen:
    """Answer a few groups first, as a warm-up, and then as many groups as the time limit allows."""
    roles, prompts, n = trainer.roles, trainer.prompts, trainer.plan.at(1).n
    wanted = size = min(groups, prompts.batch_size * prompts.steps_per_epoch)
    roles.sync_rollout()
    trainer.forget_measures()
    parts: list[dict[str, NDArray[Any]]] = []
    batches: list[tuple[int, float, float]] = []
    done, began = 0, time.monotonic()
    with Progress("probe", wanted * n) as progress:
        while size > 0:
            part = _answered(trainer, config, size if done else min(size, prompts.batch_size), n)
            timings = take_timings(trainer.groups)
            parts.append(part)
            gen_s, reward_s = (timings.get(f"timing/{phase}", 0.0) for phase in ("gen", "reward"))
            batches.append((len(part["prompts"]), gen_s, reward_s))
            progress.advance(part["responses"].size, int(part["responses"].sum()))
            done, spent = done + len(part["prompts"]), time.monotonic() - began
            size = min(wanted - done, int((limit_s - spent) * done / spent))
    calls = [] if roles.reward is None else offered(roles.reward, "take_call_seconds")
    observed = take_observed(trainer.groups).to_floats()
    return Seen(
        **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
        batches=batches,
        calls=[seconds for rank in calls for seconds in rank],
        failures={name: observed.get(f"reward/{name}", 0.0) for name in _FAILURES},
    )


def _answered(trainer: PPOTrainer, config: TrainConfig, size: int, n: int) -> dict[str, NDArray[Any]]:
    """Answer the next `size` groups of prompts and return the results as columns of `Seen`."""
    roles, gatherer, algorithm = trainer.roles, trainer.gatherer, config.algorithm
    batches = range(-(-size // trainer.prompts.batch_size))
    asked = BatchFuture.concat([trainer.prompts.next() for _ in batches]).rows(slice(size))
    samples, scores = roles.generate(asked, n, gatherer.params, gatherer.dealer, learns=True)
    scores = gatherer.shaped(roles, samples, scores).select("scores", "reward_extra")
    found = samples.select("response_mask", "finish_reason").union(scores).get()
    mask, scores_B = found.ragged("response_mask"), found.dense("scores").double()
    cut = (found.non_tensor_batch["finish_reason"] == "length").astype(bool).reshape(-1, n)
    teaches = teaching(config, found, n) & ~(cut.all(1) & algorithm.mask_truncated_completions)
    filters = algorithm.filter_groups
    values_B = metric_values(found, filters.metric) if filters.enable else None
    return {
        "prompts": np.asarray(asked.index.lengths["prompts"]),
        "responses": segment_sum(mask.values, mask.offsets).numpy().reshape(-1, n),
        "cut": cut,
        "right": (metric_values(found, "acc") >= 1).numpy().reshape(-1, n),
        "rewards": scores_B.numpy().reshape(-1, n),
        "teaches": teaches,
        "kept": np.ones_like(teaches) if values_B is None else groups_with_spread(values_B, n).numpy(),
    }


def teaching(config: TrainConfig, scored: DataProto, n: int) -> NDArray[np.bool_]:
    """Return, for each group, whether its responses differ for the advantage estimator: (G) bool.

    Most estimators need responses with different rewards. For pass@k, exactly one response must be the best.
    For an estimator of several reward components, at least one component must differ.

    Args:
        config: The config of the run.
        scored: The columns `scores` and `reward_extra`, with n consecutive rows per prompt.
        n: The number of responses to each prompt.
    """
    scores_B, algorithm = scored.dense("scores").double(), config.algorithm
    if algorithm.adv_estimator == "grpo_passk":
        best = scores_B.view(-1, n).topk(2).values
        differ_KG = (best[:, 0] > best[:, 1])[None]
    elif algorithm.adv_estimator in READS_COMPONENTS:
        extras = zip(scored.non_tensor_batch["reward_extra"], scores_B.tolist(), strict=True)
        own = SCORE in algorithm.gdpo_reward_keys
        told = [{**extra, SCORE: score} if own else extra for extra, score in extras]
        components_BK = reward_components(told, algorithm.gdpo_reward_keys)
        differ_KG = torch.stack([groups_with_spread(each, n) for each in components_BK.unbind(1)])
    else:
        differ_KG = groups_with_spread(scores_B, n)[None]
    found: NDArray[np.bool_] = differ_KG.any(0).numpy()
    return found


def report(seen: Seen, config: TrainConfig) -> dict[str, Any]:
    """Return estimates for the whole run as plain values, with 95% confidence intervals.

    Fractions of groups have Wilson intervals. Responses to the same prompt are not independent. So means,
    fractions of responses and quantiles have intervals from a bootstrap over groups.
    """
    seed, filters = config.trainer.seed, config.algorithm.filter_groups
    known = needs(config.algorithm.adv_estimator)

    def of(values: NDArray[Any], *, bounded: bool = True) -> dict[str, Any]:
        each = np.asarray(values, dtype=np.float64)
        return asdict(
            estimate(each, confidence=_CONFIDENCE, resamples=_RESAMPLES, seed=seed, bounded=bounded)
        )

    kept = of(seen.kept)
    used = {"value": kept["value"], "low": kept["high"], "high": kept["low"]}
    later = seen.batches[1:] or seen.batches  # the first batch includes warm-up
    groups, gen_s, reward_s = map(sum, zip(*later, strict=True))
    timed = seen.responses[-groups:]
    return {
        "groups": len(seen.prompts),
        "n": seen.responses.shape[1],
        "compares_groups": None if known is None else known.group,
        "teach": of(seen.teaches),
        "all_right": of(np.all(seen.right, 1)),
        "all_wrong": of(~np.any(seen.right, 1)),
        "generated_per_used": {k: 1 / s if s else None for k, s in used.items()} if filters.enable else None,
        "reward": of(seen.rewards.mean(1), bounded=False),
        "response_length": of(seen.responses.mean(1), bounded=False),
        **_quantiles(seen.responses, config.data.max_response_length, seed),
        "longest": int(seen.responses.max()),
        "cut": of(seen.cut.mean(1)),
        "tokens_per_s": int(timed.sum()) / max(gen_s, 1e-9),
        "reward_s": reward_s / timed.size,
        "reward_s_p95": float(np.quantile(seen.calls, 0.95)) if seen.calls else None,
        "reward_failures": seen.failures,
    }


def _quantiles(responses: NDArray[np.int64], limit: int, seed: int) -> dict[str, dict[str, float]]:
    """Return quantiles of response lengths (G, n), with their confidence intervals.

    If all samples may be below a quantile by chance, the upper end of its interval is the length limit.
    """
    groups, tail, places = len(responses), (1 - _CONFIDENCE) / 2, list(_QUANTILES.values())
    drawn = np.random.default_rng(seed).integers(0, groups, (_RESAMPLES, groups))
    again = np.array([np.quantile(responses[rows], places) for rows in drawn])
    low, high = np.quantile(again, [tail, 1 - tail], axis=0)
    high = np.where(np.power(places, responses.size) <= tail, high, limit)
    bounds = zip(_QUANTILES, np.quantile(responses, places), low, high, strict=True)
    return {
        name: dict(zip(("value", "low", "high"), map(float, each), strict=True)) for name, *each in bounds
    }
