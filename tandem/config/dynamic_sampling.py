"""What decides which samples are learnt from: dynamic sampling, long responses, the order of prompts, the
entropy that is held."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from tandem.config.section import LocalPath, Section, key

GATHERING = "trainer.gathering"


def _by_step(value: Any) -> Any:
    """A file of settings, and a dotted path, may spell the number of a step as text."""
    if not isinstance(value, dict):
        return value
    return {int(step) if isinstance(step, str) and step.isdecimal() else step: n for step, n in value.items()}


BySteps = Annotated[dict[int, int], BeforeValidator(_by_step)]
"""A whole number from a training step on: {step: number, …}."""


class FilterGroupsConfig(Section):
    """Dynamic sampling (Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2): prompts whose responses are all
    worth the same teach nothing; they are left out, and further prompts take their place."""

    enable: bool = key(
        False, "leave out prompts whose responses do not differ in the metric", read_by=GATHERING
    )
    metric: str = key(
        "acc",
        "acc, score: what the reward says; seq_reward, reward: with the punishment of long responses; "
        "seq_final_reward: with the KL too; or any number that the reward function returns",
        read_by=GATHERING,
    )
    max_num_gen_batches: int = key(
        0,
        "generation batches of a step before the run ends with an error; 0: as many as it takes to try "
        "every training prompt once",
        read_by=GATHERING,
        ge=0,
    )


class OverlongBufferConfig(Section):
    """Soft punishment of long responses (DAPO, eq. 13): from max_response_length - len tokens on the reward
    falls in a straight line, by penalty_factor at max_response_length. Validation is not punished."""

    enable: bool = key(False, "take off the punishment from training rewards", read_by=GATHERING)
    len: int | None = key(
        None, "tokens before data.max_response_length that are punished", read_by=GATHERING, ge=1
    )
    penalty_factor: float = key(1.0, "what is taken off at data.max_response_length", read_by=GATHERING, gt=0)
    log: bool = key(
        False, "report it: reward/extra/overlong_reward, reward/extra/overlong", read_by=GATHERING
    )


class SamplerConfig(Section):
    """The order in which prompts are drawn, where it follows what was observed of them (a curriculum)."""

    class_path: LocalPath | None = key(
        None,
        "Python file or module with the sampler's class; null: tandem.data.curriculum",
        read_by="workers.data",
    )
    class_name: str | None = key(
        None,
        "the class; null: no sampler, the order of data.shuffle",
        read_by="workers.data, trainer.assembly",
    )
    kwargs: dict[str, Any] = key({}, "further arguments of the class", read_by="workers.data")


class AdaptiveEntropyConfig(Section):
    """An entropy coefficient that keeps the policy's entropy at a target (He et al. 2025, Skywork-OR1, arXiv
    2505.22312, section 4). It begins at entropy_coeff."""

    enabled: bool = key(False, "move entropy_coeff by the entropy of each step", read_by="trainer.assembly")
    target_entropy: float = key(
        0.2, "nats per token; above it the coefficient is zero", read_by="trainer.assembly", gt=0
    )
    max_ent_coef: float = key(0.005, "the coefficient's upper bound", read_by="trainer.assembly", ge=0)
    min_ent_coef: float = key(0.0, "the coefficient's lower bound", read_by="trainer.assembly", ge=0)
    delta_ent_coef: float = key(
        0.0001, "by which it goes up or down after each step", read_by="trainer.assembly", gt=0
    )
