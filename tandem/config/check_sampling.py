"""Rules about which samples are learnt from: dynamic sampling, long responses, group sizes, the sampler, the
entropy's control."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.rule import Rule
from tandem.config.use import Use
from tandem.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FILTER, OVERLONG, SAMPLER = "algorithm.filter_groups", "reward_model.overlong_buffer", "data.sampler"
ENTROPY = f"{ACTOR}.adaptive_entropy"
MASK = "algorithm.mask_truncated_completions"
SCHEDULE = f"{ROLLOUT}.n_schedule"


def _filter_groups(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    settings, data = config.algorithm.filter_groups, config.data
    if not settings.enable:
        return
    least = min(config.actor_rollout_ref.rollout.group_sizes.values())
    if least < 2:
        yield ConfigError(
            "one response alone never differs",
            field=f"{FILTER}.enable",
            got=f"true with {least} response per prompt",
            expected=f"{ROLLOUT}.n, and all of {SCHEDULE}, >= 2",
            remedy=f"set {ROLLOUT}.n=8, or {FILTER}.enable=false",
        )
    if settings.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield ConfigError(
            "with the KL in the reward all responses differ, and nothing would be left out",
            field=f"{FILTER}.metric",
            got=settings.metric,
            expected="a metric without the KL",
            remedy=f"set {FILTER}.metric=seq_reward, or algorithm.use_kl_in_reward=false",
        )
    batches = settings.max_num_gen_batches
    if batches and batches * data.prompts_at_a_time < data.train_batch_size:
        yield ConfigError(
            "so few prompts can never fill a batch",
            field=f"{FILTER}.max_num_gen_batches",
            got=f"{batches} batches of {data.prompts_at_a_time} prompts",
            expected=f"at least data.train_batch_size={data.train_batch_size} prompts",
            remedy=f"set {FILTER}.max_num_gen_batches=0, or raise data.gen_batch_size",
        )


def _overlong(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    buffer, longest = config.reward_model.overlong_buffer, config.data.max_response_length
    if buffer.enable and (buffer.len is None or buffer.len > longest):
        yield ConfigError(
            "missing" if buffer.len is None else "longer than the longest response",
            field=f"{OVERLONG}.len",
            got=buffer.len,
            expected=f"1 to data.max_response_length={longest} tokens",
            remedy=f"set {OVERLONG}.len={max(1, longest // 5)}, a fifth of the greatest length",
        )


def _mask_truncated(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    rollout = config.actor_rollout_ref.rollout
    if config.algorithm.mask_truncated_completions and rollout.ignore_eos and not rollout.stop:
        yield ConfigError(
            "every response is cut, and nothing would be learnt from",
            field=MASK,
            got=f"true with {ROLLOUT}.ignore_eos=true",
            remedy=f"set {ROLLOUT}.ignore_eos=false, or {MASK}=false",
        )


def _schedule(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    for step, n in config.actor_rollout_ref.rollout.n_schedule.items():
        if step < 1 or n < 1:
            yield ConfigError(
                "out of range",
                field=SCHEDULE,
                got=f"{step}: {n}",
                expected="a training step >= 1, and a number of responses >= 1",
                remedy=f"write for instance {SCHEDULE}={{1: 4, 100: 8}}",
            )
        elif n == 1 and config.algorithm.adv_estimator == "rloo":
            yield ConfigError(
                "rloo leaves one sample of a prompt out, and there is only one",
                field=SCHEDULE,
                got=f"{step}: {n}",
                expected=">= 2 responses",
                remedy="raise it, or choose another algorithm.adv_estimator",
            )


def _sampler(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    path, name = config.data.sampler.class_path, config.data.sampler.class_name
    if path is None:
        return
    if name is None:
        yield ConfigError(
            "names a file, and no class in it",
            field=f"{SAMPLER}.class_path",
            got=path,
            expected=f"{SAMPLER}.class_name beside it",
            remedy=f"set {SAMPLER}.class_name, or remove this key",
        )
    elif (path.endswith(".py") or os.sep in path) and not os.path.isfile(path):
        yield ConfigError("no such file", field=f"{SAMPLER}.class_path", got=path, remedy="check the path")


def _entropy(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    actor = config.actor_rollout_ref.actor
    bounds = actor.adaptive_entropy
    if not bounds.enabled:
        return
    if bounds.min_ent_coef > bounds.max_ent_coef:
        yield ConfigError(
            "above the upper bound",
            field=f"{ENTROPY}.min_ent_coef",
            got=bounds.min_ent_coef,
            expected=f"at most {ENTROPY}.max_ent_coef={bounds.max_ent_coef}",
            remedy="lower it, or raise the upper bound",
        )
    elif not bounds.min_ent_coef <= actor.entropy_coeff <= bounds.max_ent_coef:
        yield ConfigError(
            "begins outside its bounds",
            field=f"{ACTOR}.entropy_coeff",
            got=actor.entropy_coeff,
            expected=f"{bounds.min_ent_coef} to {bounds.max_ent_coef}, the bounds of {ENTROPY}",
            remedy=f"set {ACTOR}.entropy_coeff={bounds.min_ent_coef}, or widen the bounds",
        )


_N = (f"{ROLLOUT}.n", SCHEDULE)
_ENTROPY_BOUNDS = tuple(f"{ENTROPY}.{name}" for name in ("enabled", "min_ent_coef", "max_ent_coef"))

SAMPLING_RULES: list[Rule[TrainConfig]] = [
    Rule(
        (f"{FILTER}.enable", f"{FILTER}.metric", f"{FILTER}.max_num_gen_batches", *_N, "data.gen_batch_size",
         "data.train_batch_size", "algorithm.use_kl_in_reward"),
        _filter_groups,
    ),
    Rule((f"{OVERLONG}.enable", f"{OVERLONG}.len", "data.max_response_length"), _overlong),
    Rule((MASK, f"{ROLLOUT}.ignore_eos", f"{ROLLOUT}.stop"), _mask_truncated),
    Rule((SCHEDULE, "algorithm.adv_estimator"), _schedule),
    Rule((f"{SAMPLER}.class_path", f"{SAMPLER}.class_name"), _sampler),
    Rule((*_ENTROPY_BOUNDS, f"{ACTOR}.entropy_coeff"), _entropy),
]  # fmt: skip

SAMPLING_ERRORS: list[Use[Any]] = [
    Use(
        ("data.gen_batch_size", f"{FILTER}."),
        (f"{FILTER}.enable",),
        lambda config: config.algorithm.filter_groups.enable,
        f"with {FILTER}.enable=true",
    ),
    Use(
        (f"{OVERLONG}.",),
        (f"{OVERLONG}.enable",),
        lambda config: config.reward_model.overlong_buffer.enable,
        f"with {OVERLONG}.enable=true",
    ),
    Use(
        (f"{ENTROPY}.",),
        (f"{ENTROPY}.enabled",),
        lambda config: config.actor_rollout_ref.actor.adaptive_entropy.enabled,
        f"with {ENTROPY}.enabled=true",
    ),
    Use(
        (f"{SAMPLER}.kwargs",),
        (f"{SAMPLER}.class_name",),
        lambda config: config.data.sampler.class_name is not None,
        f"with {SAMPLER}.class_name",
    ),
    Use(
        ("data.shuffle",),
        (f"{SAMPLER}.class_name",),
        lambda config: config.data.sampler.class_name is None,
        f"without {SAMPLER}.class_name, which draws the prompts",
    ),
]
