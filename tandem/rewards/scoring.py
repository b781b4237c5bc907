"""The scoring of a batch: the calls that it takes, and what is known of its scores."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.config.rewards import RewardConfig
from tandem.errors import RewardError
from tandem.rewards.base import Reward, Scorer, reward_for
from tandem.rewards.items import Item, Scored, reason
from tandem.rewards.serving import Answer

ASIDE = 64  # asynchronous calls of one process that wait side by side


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One call of a function.

    Attributes:
        reward: the function, the first of them if they are several.
        parts: which of the scorer's functions; several are asynchronous, for one response.
        places: of the samples that it scores.
        tries: calls before it that failed.
    """

    reward: Reward
    parts: tuple[int, ...]
    places: tuple[int, ...]
    tries: int = 0

    def divided(self) -> list[RewardCall]:
        """Calls for less that do the same: for each sample, then for each function; none where it is one."""
        if len(self.places) > 1 and not self.reward.batched:
            return [replace(self, places=(place,)) for place in self.places]
        return [replace(self, parts=(part,)) for part in self.parts] if len(self.parts) > 1 else []


def calls_of(items: Sequence[Item], scorers: Sequence[Scorer]) -> Iterator[RewardCall]:
    """Yield the calls that score some items, each by its scorer: a function for one response is called for
    each, asynchronous calls go together, of several functions too, a batched function takes all, one for
    groups takes the responses to one prompt."""
    places_of: dict[Scorer, list[int]] = {}
    for place, scorer in enumerate(scorers):
        places_of.setdefault(scorer, []).append(place)
    for scorer, places in places_of.items():
        aside = tuple(part for part, reward in enumerate(scorer.parts) if reward.asynchronous)
        for part, reward in enumerate(scorer.parts):
            if part in aside[1:]:
                continue
            if reward.style == "group":
                groups: dict[str, list[int]] = {}
                for place in places:
                    groups.setdefault(items[place].uid, []).append(place)
                divided = list(groups.values())
            else:
                size = len(places) if reward.batched else ASIDE if reward.asynchronous else 1
                divided = [places[at : at + size] for at in range(0, len(places), size)]
            parts = aside if part in aside else (part,)
            yield from (RewardCall(reward, parts, tuple(some)) for some in divided)


class BatchScores:
    """The scores of a batch, as far as they are known: calls that wait, scores, and failures by place."""

    def __init__(self, items: Sequence[Item], own: Scorer | None, config: RewardConfig) -> None:
        self.items, self._config = items, config
        self._scorers = [own or reward_for(item.data_source) for item in items]
        self.waiting = deque(calls_of(items, self._scorers))
        self.failures: dict[int, RewardError] = {}
        self.counts: Counter[str] = Counter()
        self._left = sum(len(call.places) * len(call.parts) for call in self.waiting)
        self._found: dict[tuple[int, int], Scored | None] = {}

    @property
    def done(self) -> bool:
        return len(self._found) == self._left

    def of(self, call: RewardCall) -> dict[int, Item]:
        """The items of a call, by their place."""
        return {place: self.items[place] for place in call.places}

    def rewards(self, call: RewardCall) -> list[Reward]:
        """The functions of a call."""
        return [self._scorers[call.places[0]].parts[part] for part in call.parts]

    def take(self, call: RewardCall, said: Answer) -> None:
        """Take the scores by each of a call's functions. Where it has failed, it is divided, tried again, or
        its samples have no score.

        Raises:
            RewardError: the given one, where `reward.on_error` is raise.
        """
        scores: Sequence[Mapping[int, Scored | None]] = said.scores
        if said.error is not None:
            if divided := call.divided():
                self.waiting.extend(divided)
                return
            if call.tries < self._config.retries:
                self.counts["retried"] += len(call.places)
                self.waiting.append(replace(call, tries=call.tries + 1))
                return
            scores = [dict.fromkeys(call.places, self._none(call.places, said.error))]
        for part, found in zip(call.parts, scores, strict=True):
            self._found.update({(place, part): scored for place, scored in found.items()})

    def _none(self, places: Sequence[int], error: RewardError) -> Scored:
        """What stands for the score of samples that have none."""
        if self._config.on_error == "raise":
            raise error
        self.failures |= dict.fromkeys(places, error)
        return Scored(0.0, why=reason(f"failed: {str(error).splitlines()[0]}"))

    def scores(self) -> list[Scored]:
        """All scores, in the order of the items.

        Raises:
            RewardError: no function has something to say of one, and `reward.on_error` is raise.
        """
        found = []
        for place, (item, scorer) in enumerate(zip(self.items, self._scorers, strict=True)):
            parts = [self._found[place, part] for part in range(len(scorer.parts))]
            try:
                scored = scorer.joined(place, item, parts)
            except RewardError as error:
                scored = self._none([place], error)
            found.append(replace(scored, failed=place in self.failures))
        self.counts["failed"] = len(self.failures)
        return found
