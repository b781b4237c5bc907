"""Combine the scores of reward models and reward functions into one reward.

The reward is the weighted sum, or the result of a user's function. Running means and standard deviations
normalize the scores of models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.config.rewards import FUNCTIONS
from tandem.config.root import TrainConfig
from tandem.errors import ConfigError, RewardError
from tandem.loading import load_function
from tandem.rewards.calling import describe_error, exits_raised, limited, load_seconds
from tandem.rewards.items import as_number


class Running(NamedTuple):
    """The statistics of all scores so far (Welford 1962, in the form of Chan et al. 1983 for batches).

    Attributes:
        scores: The number of scores.
        mean: The mean of the scores.
        squares: The sum of squared differences from the mean.
    """

    scores: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def after(self, scores: Sequence[float]) -> Running:
        """Return new statistics that include more scores."""
        if not scores:
            return self
        new = math.fsum(scores) / len(scores)
        own = math.fsum((score - new) ** 2 for score in scores)
        count, apart = self.scores + len(scores), new - self.mean
        mean = self.mean + apart * len(scores) / count
        return Running(count, mean, self.squares + own + apart**2 * self.scores * len(scores) / count)

    @property
    def deviation(self) -> float:
        """The standard deviation; 1 if all scores are equal."""
        return math.sqrt(self.squares / max(self.scores, 1)) or 1.0

    def normalised(self, score: float) -> float:
        """Return (score - mean) / standard deviation; before the first score, the score itself."""
        return (score - self.mean) / self.deviation


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a reward: the reward functions, or one reward model.

    Attributes:
        name: The name of the part's metric.
        weight: The weight of the part's score in the sum.
        normalize: Whether to normalize the part's scores.
        functions: For reward functions: the names of the functions, if there are several functions. None for
            a model.
    """

    name: str
    weight: float = 1.0
    normalize: bool = False
    functions: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Combination:
    """The rule that combines the parts of a reward into one score.

    Attributes:
        parts: The reward functions first, if there are any, then the reward models.
        function: The user's function `file.py:function`, which receives a dict from part name to score; None:
            the weighted sum.
        on_error: What to do with a failed score; see `reward.on_error`.
        tells: Whether the score of each part is reported separately.
    """

    parts: tuple[Part, ...]
    function: str | None = None
    on_error: str = "raise"
    tells: bool = True

    @property
    def models(self) -> frozenset[str]:
        """The names of the reward models."""
        return frozenset(part.name for part in self.parts if part.functions is None)

    @property
    def normalises(self) -> bool:
        return any(part.normalize for part in self.parts)

    def made(self, scores: Mapping[str, float], sample: str) -> float:
        """Call the user's function with the scores of a sample, and return the combined score.

        Args:
            scores: A dict from part name to score.
            sample: The sample, for the message.

        Raises:
            RewardError: The function raised an exception, or did not return a finite number.
        """
        assert self.function is not None
        function = _loaded(self.function)
        expected = "a finite number, for a mapping of the parts' scores by name"
        told_scores = ", ".join(f"{name} {score:.4g}" for name, score in scores.items())
        where = {"field": f"reward.combine={self.function}, {sample}", "expected": expected}
        try:
            with exits_raised():
                found = function(dict(scores))
        except (Exception, SystemExit) as error:
            raise RewardError(f"the function {describe_error(error)}", got=told_scores, **where) from error
        number = as_number(found)
        if number is None or not math.isfinite(number):
            got = f"{found!r:.80} for {told_scores}"
            raise RewardError("the function did not return a finite number", got=got, **where)
        return number


_loaded = functools.cache(load_function)


def load_combine(reference: str, timeout: float) -> None:
    """Try to load the function of `reward.combine`, within the time limit for a reward's file.

    Args:
        reference: The function, `file.py:function`.
        timeout: The time limit of a call, `reward.timeout`, in seconds.

    Raises:
        ConfigError: The function cannot be loaded, or loading takes too long.
    """
    try:
        with exits_raised(), limited(load_seconds(timeout), reference):
            load_function(reference)
    except TimeoutError as error:
        raise ConfigError(
            f"the file takes too long to load: {error}",
            field=reference,
            expected="a file that loads within reward.timeout, or within 30 s if that is longer",
            remedy="raise reward.timeout, or let the file load what it needs at the first call",
        ) from error


def combination_of(config: TrainConfig) -> Combination | None:
    """Return the rule that combines a run's rewards; None if the run has no reward models.

    Raises:
        ConfigError: The user's function cannot be loaded.
    """
    own, models, combine = config.custom_reward_function, config.reward_model.scorers, config.reward.combine
    if combine is not None:
        load_combine(combine, config.reward.timeout)
    parts: list[Part] = []
    if config.calls_functions:
        names = tuple(term.label or term.name for term in own.terms)
        weight = 1.0 if config.reward.weight is None else config.reward.weight
        parts.append(Part(own.name if own.path and not names else FUNCTIONS, weight, functions=names))
    parts += [Part(role.rpartition(".")[2], term.weight, term.normalize) for role, term in models.items()]
    if not models and combine is None:
        return None
    tells = len(parts) > 1 or bool(config.reward_model.models) or combine is not None
    return Combination(tuple(parts), combine, config.reward.on_error, tells)
