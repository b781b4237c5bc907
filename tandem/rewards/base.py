"""What a reward is, which one a data source gets, and how its answers are checked.

A reward is a function, here as verl calls it (`tandem.rewards.signatures` has the other ways)

    compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float | dict

A dict has the key "score"; its other numbers become metrics, among them "acc", whether the response is
right; "pred" is the answer that the function read in it, "why" a text that says what the score is for; other
entries are for the function's own use. A function with the attribute `batched = True` scores many responses
in one call:

    compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list of the same
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tandem.errors import RewardError
from tandem.observability.terminal import printable
from tandem.rewards.calling import AGAIN, awaited, end_copy, exits_raised, of_network, told
from tandem.rewards.items import ANSWER_CHARACTERS, Item, Scored, as_number, shown
from tandem.rewards.signatures import VERLS, Reads

HEAD_CHARACTERS = 200
"""How much of a response a message shows."""
MOST_ENTRIES = 1000
"""Entries of a dict that a function may return."""
NAME_CHARACTERS = 200
"""The longest name of a number in it."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class Reward:
    """A reward function with its fixed arguments.

    Attributes:
        name: for messages.
        function: see the module's docstring.
        kwargs: further arguments of every call.
        answer: reads the answer in a response, with `kwargs`, where the function does not give it as "pred".
        bounded: whether it ends soon whatever the response is, and needs no limit.
        check: takes the further arguments before any call, refuses those with which all would fail, and
            returns the columns that it needs then.
    """

    name: str
    function: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    answer: Callable[..., str | None] | None = None
    bounded: bool = False
    check: Callable[..., Sequence[str]] | None = None

    @property
    def batched(self) -> bool:
        return bool(getattr(self.function, "batched", False))

    @property
    def grouped(self) -> bool:
        """Whether a call takes the responses to one prompt."""
        return False

    @property
    def parts(self) -> tuple[Reward, ...]:
        """See `Scorer`."""
        return (self,)

    @property
    def asynchronous(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def reads(self) -> Reads:
        """The columns of the data that it reads."""
        return VERLS

    def arguments(self, item: Item) -> dict[str, Any]:
        """The arguments of a call for one response."""
        return {
            "data_source": item.data_source,
            "solution_str": item.solution_str,
            "ground_truth": item.ground_truth,
            "extra_info": dict(item.extra_info),
        }

    def batch_arguments(self, items: Sequence[Item]) -> dict[str, Any]:
        """The arguments of a call for several."""
        return {
            "data_sources": [item.data_source for item in items],
            "solution_strs": [item.solution_str for item in items],
            "ground_truths": [item.ground_truth for item in items],
            "extra_infos": [dict(item.extra_info) for item in items],
        }

    def __call__(self, items: Mapping[int, Item]) -> list[Any]:
        """What the function returns for each item, unchecked.

        Args:
            items: by their place in the batch, which messages name.

        Raises:
            RewardError: it raised, or, if batched, returned something that is no list as long as `items`.
        """
        if self.batched:
            return self._call_batched(items)
        if self.asynchronous:
            found: list[Any] = awaited(self._call_all(items))
            return found
        return [self._call_one(place, item) for place, item in items.items()]

    def scores(self, items: Mapping[int, Item]) -> dict[int, Scored | None]:
        """The scores of items, by their place in the batch; None where the function returned None.

        Raises:
            RewardError: it raised, or returned anything else but a finite number or a dict of one.
        """
        return self._checked(items, self(items))

    def _checked(self, items: Mapping[int, Item], values: Sequence[Any]) -> dict[int, Scored | None]:
        return {
            place: None if value is None else self._check(value, place, items[place])
            for place, value in zip(items, values, strict=True)
        }

    def _check(self, value: Any, place: int, item: Item) -> Scored:
        try:
            return checked(self, value, place, item)
        except (RewardError, KeyboardInterrupt):
            raise
        except BaseException as error:  # to read it runs code of the user's, such as __float__
            raise self.error(
                f"returned what cannot be read: reading it {told(error)}", place, item
            ) from error

    def joined(self, place: int, item: Item, parts: Sequence[Scored | None]) -> Scored:
        """See `Scorer`."""
        (scored,) = parts
        return checked(self, None, place, item) if scored is None else scored

    def _call_one(self, place: int, item: Item) -> Any:
        try:
            with exits_raised():
                return self.function(**self.arguments(item), **self.kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._raised(error, place, item) from error

    async def _call_all(self, items: Mapping[int, Item]) -> list[Any]:
        """The calls of an asynchronous function, which wait side by side."""

        pid = os.getpid()

        async def call(place: int, item: Item) -> Any:
            try:
                return await self.function(**self.arguments(item), **self.kwargs)
            except BaseException as error:  # the keys of a terminal reach the main thread alone, not this one
                raise self._raised(error, place, item) from error
            finally:
                end_copy(pid)

        return await _side_by_side([call(*pair) for pair in items.items()])

    def _call_batched(self, items: Mapping[int, Item]) -> list[Any]:
        first = next(iter(items.items()))
        try:
            with exits_raised():
                values = self.function(**self.batch_arguments(list(items.values())), **self.kwargs)
                values = awaited(values) if inspect.iscoroutine(values) else values
                plain = isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__")
                listed = [] if plain or len(values) != len(items) else list(values)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._raised(error, *first, also=" (it is batched: shown is the first sample)") from error
        if plain:
            raise self.error("is batched and returned no list", *first, got=shown(values))
        if len(listed) != len(items):
            got = f"{len(values)} scores for {len(items)} responses"
            raise self.error("returned a list of the wrong length", *first, got=got)
        return listed

    def _raised(self, raised: BaseException, place: int, item: Item, also: str = "") -> RewardError:
        """The error for what the function raised."""
        error = self.error(told(raised) + also, place, item)
        if of_network(raised):
            error.remedy = AGAIN
        return error

    def error(self, problem: str, place: int, item: Item, *, got: str | None = None) -> RewardError:
        """The error for one sample: which one, of which source, and how its response begins."""
        row = "" if item.index is None else f", row {item.index} of the data"
        response = f"the response {item.solution_str[:HEAD_CHARACTERS]!r}"
        return RewardError(
            f"the reward function {self.name} {problem}",
            field=f"sample {place}{row}, data_source '{item.data_source}'",
            got=response if got is None else f"{got}, for {response}",
            expected="a finite number, or a dict with one under 'score'",
            remedy="mend the reward function; it must cope with any text a model may write",
        )


def scores_of(rewards: Sequence[Reward], items: Mapping[int, Item]) -> list[dict[int, Scored | None]]:
    """The scores of items by each of several rewards, as `Reward.scores` gives those of one; asynchronous
    functions for one response wait side by side.

    Raises:
        RewardError: as there.
    """
    if len(rewards) == 1:
        return [rewards[0].scores(items)]
    values = awaited(_side_by_side([reward._call_all(items) for reward in rewards]))
    return [reward._checked(items, found) for reward, found in zip(rewards, values, strict=True)]


async def _side_by_side(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results of calls once all have ended, of which the first failure is raised."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for failed in filter(lambda each: isinstance(each, BaseException), found):
        raise failed
    return found


class Scorer(Protocol):
    """A user's own reward: one function, or several together.

    Attributes:
        parts: its functions.
        batched: whether one of them takes several responses at once.
        reads: the columns of the data that they read.
    """

    @property
    def parts(self) -> tuple[Reward, ...]: ...

    @property
    def batched(self) -> bool: ...

    @property
    def reads(self) -> Reads: ...

    def joined(self, place: int, item: Item, parts: Sequence[Scored | None]) -> Scored:
        """The score of a response, of what each function says; None: it has nothing to say.

        Raises:
            RewardError: none of them has.
        """
        ...


def checked(reward: Reward, value: Any, place: int, item: Item) -> Scored:
    """The score that a reward function returned for an item.

    Raises:
        RewardError: it is not a finite number, nor a dict of one.
    """
    entries = dict(value) if isinstance(value, Mapping) else {"score": value}
    if len(entries) > MOST_ENTRIES:
        got = f"{len(entries)} entries, at most {MOST_ENTRIES} are kept"
        raise reward.error("returned a dict with too many entries", place, item, got=got)
    if "score" not in entries:
        raise reward.error("returned a dict without 'score'", place, item, got=shown(value))
    main = as_number(entries.pop("score"))
    if main is None:
        raise reward.error("returned something that is not a number", place, item, got=shown(value))
    numbers = {str(name): as_number(entry) for name, entry in entries.items()}
    extra = {name: number for name, number in numbers.items() if number is not None}
    if odd := [name for name in extra if len(name) > NAME_CHARACTERS or printable(name) != name]:
        got = printable(f"{odd[0]!r:.80}")
        raise reward.error("returned a number whose name is too long, or not printable", place, item, got=got)
    if not all(map(math.isfinite, (main, *extra.values()))):
        raise reward.error("returned a number that is not finite", place, item, got=shown(value))
    answer = entries.get("pred")
    if answer is None and reward.answer is not None:
        answer = reward.answer(item.solution_str, **reward.kwargs)
    reads = reward.answer is not None or "pred" in entries
    why = entries.get("why")
    if not isinstance(why, str):
        why = _compared(answer, item.ground_truth) if reads else ""
    said = None if answer is None else str(answer)[:ANSWER_CHARACTERS]
    return Scored(main, extra, said, reads, why=why)


def _compared(answer: Any, truth: Any) -> str:
    """Why, of a reward that compares an answer and says no more."""
    if answer is None:
        return "no answer found"
    return f"answer {answer!s:.200}" + ("" if truth is None else f", expected {truth!s:.200}")


_REWARDS: dict[str, Reward] = {}
_SHIPPED: list[Reward] = []


def register_reward(
    *data_sources: str,
    answer: Callable[..., str | None] | None = None,
    bounded: bool = False,
    check: Callable[..., Sequence[str]] | None = None,
) -> Callable[[Function], Function]:
    """Decorator: the reward function of these data sources; "name*" stands for all that begin with name. With
    none the function is one that users name.

    Args:
        answer, bounded, check: see `Reward`.

    Raises:
        RewardError: one of them has a reward already.
    """

    def register(function: Function) -> Function:
        name = f"{function.__module__}.{function.__name__}"
        reward = Reward(name, function, answer=answer, bounded=bounded, check=check)
        for data_source in data_sources:
            if data_source in _REWARDS:
                raise RewardError(
                    "the data source has a reward already",
                    field=data_source,
                    got=reward.name,
                    expected=_REWARDS[data_source].name,
                )
            _REWARDS[data_source] = reward
        _SHIPPED.append(reward)
        return function

    return register


def shipped(function: Callable[..., Any]) -> Reward:
    """A function, or a partial call of it, as it was registered; one of a user's own as it is."""
    whole = getattr(function, "func", function)
    return next((reward for reward in _SHIPPED if reward.function is whole), Reward("", function))


def known_data_sources() -> tuple[str, ...]:
    """Registered names, sorted; a trailing * stands for any ending."""
    return tuple(sorted(_REWARDS))


def reward_for(data_source: str) -> Reward:
    """The reward registered for exactly this name, else for its longest registered beginning.

    Raises:
        RewardError: there is none.
    """
    if data_source in _REWARDS:
        return _REWARDS[data_source]
    beginnings = [name for name in _REWARDS if name.endswith("*") and data_source.startswith(name[:-1])]
    if beginnings:
        return _REWARDS[max(beginnings, key=len)]
    raise RewardError(
        "no reward function for this data source",
        field=f"data_source '{data_source}'",
        expected=f"one of {', '.join(known_data_sources())}",
        remedy="name your own function with custom_reward_function.path and custom_reward_function.name, "
        "or write one of these names into the data",
    )
