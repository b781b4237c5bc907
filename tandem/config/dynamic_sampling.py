"""Config sections that select training samples, their order, and the entropy target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator

from tandem.config.needs import Check, module_or_file
from tandem.config.section import LocalPath, Section, When, key
from tandem.config.view import path, root
from tandem.errors import ConfigError


def _by_step(value: Any) -> Any:
    """Convert step numbers that are written as text, as in JSON and in dotted paths, to integers."""
    if not isinstance(value, dict):
        return value
    return {int(step) if isinstance(step, str) and step.isdecimal() else step: n for step, n in value.items()}


BySteps = Annotated[dict[int, int], BeforeValidator(_by_step)]
"""A schedule of integers, {step: number, …}. Each number applies from its training step on."""


def _groups(own: Any, name: str) -> Iterator[ConfigError]:
    rollout = root(own).actor_rollout_ref.rollout
    least, at_n = min(rollout.group_sizes.values()), path(rollout, "n")
    if least < 2:
        yield ConfigError(
            "a single response per prompt never differs from the others, because there are none",
            got=f"true with {least} response per prompt",
            expected=f"{at_n}, and all of {path(rollout, 'n_schedule')}, >= 2",
            remedy=f"set {at_n}=8, or {path(own, name)}=false",
        )


_WITHOUT_KL = Check(
    lambda own, metric: metric == "seq_final_reward" and root(own).algorithm.use_kl_in_reward,
    "with the KL in the reward all responses differ, so no prompt would be left out",
    expected="a metric without the KL",
    remedy="set {}=seq_reward, or algorithm.use_kl_in_reward=false",
)


def _never_fills(own: Any, batches: int) -> bool:
    data = root(own).data
    return bool(batches > 0 and batches * data.prompts_at_a_time < data.train_batch_size)


_FILLS_A_BATCH = Check(
    _never_fills,
    "this many prompts can never fill a training batch",
    got="{=} batches of {=data.prompts_at_a_time} prompts",
    expected="at least {data.train_batch_size=} prompts",
    remedy="set {}=0, or raise data.gen_batch_size",
)


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2).

    Prompts whose responses all have the same value do not change the policy. Such prompts are left out, and
    more prompts replace them.

    Attributes:
        enable: Leave out prompts whose responses all have the same value of the metric.
        metric: The value that is compared. acc, score: the value that the reward function returns.
            seq_reward, reward: the reward including the penalty for long responses. seq_final_reward: the
            reward that also includes the KL penalty. You can also name any other number that the reward
            function returns.
        max_num_gen_batches: Maximum number of generation batches in one step. If these batches do not fill
            the training batch, the run stops with an error. 0: enough to try every training prompt once.
    """

    enable: bool = key(False, needs=_groups)
    metric: str = key("acc", needs=_WITHOUT_KL)
    max_num_gen_batches: int = key(0, needs=_FILLS_A_BATCH, ge=0)


def _within_longest(own: Any, name: str) -> Iterator[ConfigError]:
    longest = root(own).data.max_response_length
    if own.enable and (own.len is None or own.len > longest):
        yield ConfigError(
            "missing" if own.len is None else "longer than the longest response",
            expected=f"1 to data.max_response_length={longest} tokens",
            remedy=f"set {path(own, name)}={max(1, longest // 5)}, a fifth of the longest response",
        )


class OverlongBufferConfig(Section):
    """A soft penalty for long responses (DAPO, eq. 13).

    For responses longer than max_response_length - len tokens, the penalty grows linearly. At
    max_response_length, the penalty is penalty_factor. Validation rewards have no such penalty.

    Attributes:
        enable: Subtract the penalty from training rewards.
        len: Number of tokens before data.max_response_length in which the penalty grows from 0 to
            penalty_factor.
        penalty_factor: The penalty at data.max_response_length.
        log: Report the penalty as the metrics reward/extra/overlong_reward and reward/extra/overlong.
    """

    enable: bool = False
    len: int | None = key(None, needs=_within_longest, ge=1)
    penalty_factor: float = key(1.0, gt=0)
    log: bool = key(False, resumed="reported")


def _with_a_class(own: Any, name: str) -> Iterator[ConfigError]:
    if own.class_path is not None and own.class_name is None:
        yield ConfigError(
            "a file is set, but no class in it",
            expected=f"{path(own, 'class_name')} too",
            remedy=f"set {path(own, 'class_name')}, or remove this key",
        )
    else:
        yield from module_or_file(own, name)


class SamplerConfig(Section):
    """A sampler that chooses the order of prompts from their earlier scores (a curriculum).

    Attributes:
        class_path: Python file or module that contains the sampler's class. null: tandem.data.curriculum.
        class_name: Name of the class. null: no sampler; data.shuffle decides the order.
        kwargs: Additional arguments of the class: {name: value, …}.
    """

    class_path: LocalPath | None = key(None, needs=_with_a_class)
    class_name: str | None = None
    kwargs: dict[str, Any] = key(
        {}, when=When(lambda own: own.class_name is not None, "if {class_name} is set")
    )


def _together(own: Any, name: str) -> Iterator[ConfigError]:
    if (own.path is None) != (own.name is None):
        missing = path(own, "name" if own.name is None else "path")
        yield ConfigError(
            "file and class must be set together", expected=f"{missing} too", remedy=f"set {missing}"
        )
    else:
        yield from module_or_file(own, "path")


class CustomClassConfig(Section):
    """Your own dataset class, which replaces the rows of the files.

    The class has the same signature as in verl.

    Attributes:
        path: Python file or module that contains the dataset class. null: the rows of the files are used.
        name: Name of the class. It receives the file names.
    """

    path: LocalPath | None = key(None, needs=_together)
    name: str | None = key(None, needs=_together)


_BELOW_UPPER = Check(
    lambda own, low: low > own.max_ent_coef,
    "above the upper bound",
    expected="at most {max_ent_coef=}",
    remedy="lower it, or raise the upper bound",
)


class AdaptiveEntropyConfig(Section):
    """An entropy coefficient that keeps the policy's entropy at a target value.

    The coefficient starts at entropy_coeff (Skywork-OR1, He et al. 2025, arXiv 2505.22312, section 4).

    Attributes:
        enabled: Adjust entropy_coeff after each step, depending on the entropy of the step.
        target_entropy: Target entropy, in nats per token. Above this entropy, the coefficient is zero.
        max_ent_coef: Upper bound of the coefficient.
        min_ent_coef: Lower bound of the coefficient.
        delta_ent_coef: Amount by which the coefficient rises or falls after each step.
    """

    enabled: bool = False
    target_entropy: float = key(0.2, gt=0)
    max_ent_coef: float = key(0.005, ge=0)
    min_ent_coef: float = key(0.0, needs=_BELOW_UPPER, ge=0)
    delta_ent_coef: float = key(0.0001, gt=0)
