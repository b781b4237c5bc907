"""The state of scoring one batch: the pending calls of reward functions, and the scores so far."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.config.rewards import RewardConfig
from tandem.errors import RewardError
from tandem.rewards.base import Reward, Scorer, reward_for
from tandem.rewards.items import Item, Scored, reason
from tandem.rewards.serving import Answer

CONCURRENT_CALLS = 64  # the most asynchronous calls of one process that wait at the same time


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One call of a reward function, or several asynchronous calls for one response.

    Attributes:
        reward: The function; if there are several, the first function.
        parts: The indices of the functions in the scorer's `parts`. If there are several functions, they are
            asynchronous and score the same response.
        places: The row numbers of the samples to score.
        tries: The number of earlier failed tries.
    """

    reward: Reward
    parts: tuple[int, ...]
    places: tuple[int, ...]
    tries: int = 0

    def divided(self) -> list[RewardCall]:
        """Split the call by samples, else by functions; return [] if it has one sample and one function."""
        if len(self.places) > 1 and not self.reward.batched:
            return [replace(self, places=(place,)) for place in self.places]
        return [replace(self, parts=(part,)) for part in self.parts] if len(self.parts) > 1 else []


def calls_of(items: Sequence[Item], scorers: Sequence[Scorer]) -> Iterator[RewardCall]:
    """Yield the calls that score the items.

    A function for one response is called once per response. Asynchronous functions for the same response
    share one RewardCall. A batched function is called with all responses, and a group function with all
    responses to one prompt.
    """
    places_of: dict[Scorer, list[int]] = {}
    for place, scorer in enumerate(scorers):
        places_of.setdefault(scorer, []).append(place)
    for scorer, places in places_of.items():
        concurrent = tuple(part for part, reward in enumerate(scorer.parts) if reward.asynchronous)
        for part, reward in enumerate(scorer.parts):
            if part in concurrent[1:]:
                continue
            if reward.style == "group":
                groups: dict[str, list[int]] = {}
                for place in places:
                    groups.setdefault(items[place].uid, []).append(place)
                divided = list(groups.values())
            else:
                size = len(places) if reward.batched else CONCURRENT_CALLS if reward.asynchronous else 1
                divided = [places[at : at + size] for at in range(0, len(places), size)]
            parts = concurrent if part in concurrent else (part,)
            yield from (RewardCall(reward, parts, tuple(some)) for some in divided)


class BatchScores:
    """The scores of a batch so far, with the pending calls and the failures."""

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
        """Return a dict from row number to item, for the items of a call."""
        return {place: self.items[place] for place in call.places}

    def rewards(self, call: RewardCall) -> list[Reward]:
        """Return the functions of a call."""
        return [self._scorers[call.places[0]].parts[part] for part in call.parts]

    def take(self, call: RewardCall, result: Answer) -> None:
        """Store the result of a call.

        A failed call is split or tried again; if neither is possible, its samples get a placeholder score.

        Args:
            call: The call.
            result: The result of the call.

        Raises:
            RewardError: The call failed and `reward.on_error` is raise.
        """
        scores: Sequence[Mapping[int, Scored | None]] = result.scores
        if result.error is not None:
            if divided := call.divided():
                self.waiting.extend(divided)
                return
            if call.tries < self._config.retries:
                self.counts["retried"] += len(call.places)
                self.waiting.append(replace(call, tries=call.tries + 1))
                return
            scores = [dict.fromkeys(call.places, self._none(call.places, result.error))]
        for part, found in zip(call.parts, scores, strict=True):
            self._found.update({(place, part): scored for place, scored in found.items()})

    def _none(self, places: Sequence[int], error: RewardError) -> Scored:
        """Record a failure and return the placeholder score of its samples."""
        if self._config.on_error == "raise":
            raise error
        self.failures |= dict.fromkeys(places, error)
        return Scored(0.0, why=reason(f"failed: {str(error).splitlines()[0]}"))

    def scores(self) -> list[Scored]:
        """Return all scores, in the order of the items.

        Raises:
            RewardError: All functions returned None for an item, and `reward.on_error` is raise.
        """
        found = []
        for place, (item, scorer) in enumerate(zip(self.items, self._scorers, strict=True)):
            parts = [self._found[place, part] for part in range(len(scorer.parts))]
            try:
                scored = scorer.combine_parts(place, item, parts)
            except RewardError as error:
                scored = self._none([place], error)
            found.append(replace(scored, failed=place in self.failures))
        self.counts["failed"] = len(self.failures)
        return found
