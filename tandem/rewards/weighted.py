"""Several reward functions whose weighted sum is the reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from tandem.config.rewards import CustomRewardConfig
from tandem.errors import RewardError
from tandem.rewards.base import Reward, Scorer
from tandem.rewards.custom import load_custom
from tandem.rewards.items import Item, Scored
from tandem.rewards.signatures import Reads


@dataclass(frozen=True, slots=True, eq=False)
class WeightedSum:
    """The weighted sum of several functions' scores; each function's own becomes a metric of its name. Where
    one returns None, it has nothing to say of that response, and the others count.

    Attributes:
        terms: (name, reward, weight) of each.

    Raises:
        RewardError: no term, or two of one name.
    """

    terms: tuple[tuple[str, Reward, float], ...]

    def __post_init__(self) -> None:
        names = [name for name, _, _ in self.terms]
        if len(set(names)) < len(names) or not names:
            raise RewardError(
                "each needs a name of its own" if names else "names no function",
                field="custom_reward_function.terms",
                got=names,
                remedy="give one of them a label, which is the name of its metric",
            )

    @property
    def batched(self) -> bool:
        return any(reward.batched for _, reward, _ in self.terms)

    @property
    def reads(self) -> Reads:
        return reduce(add, (reward.reads for _, reward, _ in self.terms))

    @property
    def parts(self) -> tuple[Reward, ...]:
        return tuple(reward for _, reward, _ in self.terms)

    def joined(self, place: int, item: Item, parts: Sequence[Scored | None]) -> Scored:
        """See `Scorer`."""
        said = [
            (name, weight, part) for (name, _, weight), part in zip(self.terms, parts, strict=True) if part
        ]
        if not said:
            _, reward, _ = self.terms[0]
            raise reward.error("and all others returned None", place, item, got="None")
        extra: dict[str, float] = {}
        for name, _, part in said:
            extra |= {(f"{name}/{key}" if key in extra else key): value for key, value in part.extra.items()}
        extra |= {name: part.score for name, _, part in said}
        answered = next((part for _, _, part in said if part.reads_answers), said[0][2])
        total = sum(weight * part.score for _, weight, part in said)
        why = "; ".join(f"{name}: {part.why}" for name, _, part in said if part.why)
        return Scored(total, extra, answered.answer, answered.reads_answers, why=why)


def own_reward(config: CustomRewardConfig, timeout: float = math.inf) -> Scorer | None:
    """Return the user's own reward; None where the data sources' own ones score.

    Args:
        timeout: see `load_custom`.

    Raises:
        RewardError: see `load_custom` and `WeightedSum`.
    """
    if not config.terms:
        if config.path is None:
            return None
        return load_custom(config.path, config.name, config.reward_kwargs, timeout)
    return WeightedSum(
        tuple(
            (
                term.label or term.name,
                load_custom(str(term.path or config.path), term.name, term.reward_kwargs, timeout),
                term.weight,
            )
            for term in config.terms
        )
    )
