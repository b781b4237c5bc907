"""Which samples are learnt from: dynamic sampling, long responses, the order of prompts, the entropy that is
held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator

from tandem.config.needs import Check, module_or_file
from tandem.config.section import LocalPath, Section, When, key
from tandem.config.view import path, root
from tandem.errors import ConfigError


def _by_step(value: Any) -> Any:
    """A file of settings, and a dotted path, may spell the number of a step as text."""
    if not isinstance(value, dict):
        return value
    return {int(step) if isinstance(step, str) and step.isdecimal() else step: n for step, n in value.items()}


BySteps = Annotated[dict[int, int], BeforeValidator(_by_step)]
"""A whole number from a training step on: {step: number, …}."""


def _groups(own: Any, name: str) -> Iterator[ConfigError]:
    rollout = root(own).actor_rollout_ref.rollout
    least, at_n = min(rollout.group_sizes.values()), path(rollout, "n")
    if least < 2:
        yield ConfigError(
            "one response alone never differs",
            got=f"true with {least} response per prompt",
            expected=f"{at_n}, and all of {path(rollout, 'n_schedule')}, >= 2",
            remedy=f"set {at_n}=8, or {path(own, name)}=false",
        )


_WITHOUT_KL = Check(
    lambda own, metric: metric == "seq_final_reward" and root(own).algorithm.use_kl_in_reward,
    "with the KL in the reward all responses differ, and nothing would be left out",
    expected="a metric without the KL",
    remedy="set {}=seq_reward, or algorithm.use_kl_in_reward=false",
)


def _never_fills(own: Any, batches: int) -> bool:
    data = root(own).data
    return bool(batches > 0 and batches * data.prompts_at_a_time < data.train_batch_size)


_FILLS_A_BATCH = Check(
    _never_fills,
    "so few prompts can never fill a batch",
    got="{=} batches of {=data.prompts_at_a_time} prompts",
    expected="at least {data.train_batch_size=} prompts",
    remedy="set {}=0, or raise data.gen_batch_size",
)


class FilterGroupsConfig(Section):
    """Dynamic sampling (Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2): prompts whose responses are all
    worth the same teach nothing; they are left out, and further prompts take their place.

    Attributes:
        enable: leave out prompts whose responses do not differ in the metric
        metric: acc, score: what the reward says; seq_reward, reward: with the punishment of long responses;
            seq_final_reward: with the KL too; or any number that the reward function returns
        max_num_gen_batches: generation batches of a step before the run ends with an error; 0: as many as it
            takes to try every training prompt once
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
            remedy=f"set {path(own, name)}={max(1, longest // 5)}, a fifth of the greatest length",
        )


class OverlongBufferConfig(Section):
    """Soft punishment of long responses (DAPO, eq. 13): from max_response_length - len tokens on the reward
    falls in a straight line, by penalty_factor at max_response_length. Validation is not punished.

    Attributes:
        enable: take off the punishment from training rewards
        len: tokens before data.max_response_length that are punished
        penalty_factor: what is taken off at data.max_response_length
        log: report it: reward/extra/overlong_reward, reward/extra/overlong
    """

    enable: bool = False
    len: int | None = key(None, needs=_within_longest, ge=1)
    penalty_factor: float = key(1.0, gt=0)
    log: bool = key(False, resumed="told")


def _with_a_class(own: Any, name: str) -> Iterator[ConfigError]:
    if own.class_path is not None and own.class_name is None:
        yield ConfigError(
            "names a file, and no class in it",
            expected=f"{path(own, 'class_name')} beside it",
            remedy=f"set {path(own, 'class_name')}, or remove this key",
        )
    else:
        yield from module_or_file(own, name)


class SamplerConfig(Section):
    """The order in which prompts are drawn, where it follows what was observed of them (a curriculum).

    Attributes:
        class_path: Python file or module with the sampler's class; null: tandem.data.curriculum
        class_name: the class; null: no sampler, the order of data.shuffle
        kwargs: further arguments of the class
    """

    class_path: LocalPath | None = key(None, needs=_with_a_class)
    class_name: str | None = None
    kwargs: dict[str, Any] = key({}, when=When(lambda own: own.class_name is not None, "with {class_name}"))


def _together(own: Any, name: str) -> Iterator[ConfigError]:
    if (own.path is None) != (own.name is None):
        missing = path(own, "name" if own.name is None else "path")
        yield ConfigError(
            "file and class belong together", expected=f"{missing} too", remedy=f"set {missing}"
        )
    else:
        yield from module_or_file(own, "path")


class CustomClassConfig(Section):
    """A dataset of one's own in the place of the files' rows, with verl's signature.

    Attributes:
        path: Python file or module with the dataset's class; null: rows are those of the files
        name: the class, which is given the files
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
    """An entropy coefficient that keeps the policy's entropy at a target (He et al. 2025, Skywork-OR1, arXiv
    2505.22312, section 4). It begins at entropy_coeff.

    Attributes:
        enabled: move entropy_coeff by the entropy of each step
        target_entropy: nats per token; above it the coefficient is zero
        max_ent_coef: the coefficient's upper bound
        min_ent_coef: the coefficient's lower bound
        delta_ent_coef: by which it goes up or down after each step
    """

    enabled: bool = False
    target_entropy: float = key(0.2, gt=0)
    max_ent_coef: float = key(0.005, ge=0)
    min_ent_coef: float = key(0.0, needs=_BELOW_UPPER, ge=0)
    delta_ent_coef: float = key(0.0001, gt=0)
