"""Reward functions: calling them, choosing one for a data source, and checking their results.

A reward function has this signature, as in verl (`tandem.rewards.signatures` lists other signatures):

    compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float | dict

A dict must have the key "score". Its other numbers become metrics; "acc" says whether the response is
correct. "pred" is the answer that the function found in the response, and "why" is a text that explains the
score. Other entries are ignored. A function with the attribute `batched = True` scores many responses in one
call:

    compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list of the same
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, TypeVar

from tandem.errors import RewardError
from tandem.observability.terminal import printable
from tandem.rewards.calling import (
    RETRY_REMEDY,
    describe_error,
    end_forked_copy,
    exits_raised,
    is_network_error,
    run_coroutine,
)
from tandem.rewards.items import ANSWER_CHARACTERS, Item, Scored, as_number, reason, shown
from tandem.rewards.signatures import VERLS, Reads, Style, arguments, loggers, with_logged

HEAD_CHARACTERS = 200  # how many characters of a response a message shows
MOST_ENTRIES = 1000  # the most entries in a dict that a function returns
NAME_CHARACTERS = 200  # the longest name of an entry

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class Reward:
    """A reward function, with its fixed arguments and the columns that it reads.

    Attributes:
        name: The function's name in messages.
        function: The function; see the module's docstring.
        kwargs: Additional arguments of every call.
        answer: A function that finds the answer in a response, called with `kwargs`; for a reward function
            that does not return "pred".
        bounded: Whether the function always returns soon, so that it needs no time limit.
        check: A function that checks `kwargs` before any call and returns the columns that `kwargs` require.
            It raises an error if every call with these arguments would fail.
        style: The signature by which the function is called.
        reads: The columns of the data that the function reads.
        takes: The names of arguments that a call may pass; None: any arguments.
    """

    name: str
    function: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    answer: Callable[..., object] | None = None
    bounded: bool = False
    check: Callable[..., Sequence[str]] | None = None
    style: Style = "verl"
    reads: Reads = VERLS
    takes: frozenset[str] | None = None

    @property
    def batched(self) -> bool:
        """Whether one call scores several responses."""
        if self.style == "verl":
            return bool(getattr(self.function, "batched", False))
        return self.style != "one"

    @property
    def parts(self) -> tuple[Reward, ...]:
        """The tuple with only this reward; `WeightedSum` has several parts."""
        return (self,)

    @property
    def asynchronous(self) -> bool:
        """Whether the function is a coroutine for one response, so that several calls can wait together."""
        return not self.batched and inspect.iscoroutinefunction(self.function)

    def arguments(self, items: Sequence[Item], **more: Any) -> dict[str, Any]:
        """Return the arguments of a call for some items, except for the fixed arguments."""
        given = arguments(self.style, items, several=self.batched) | more
        return given if self.takes is None else {name: v for name, v in given.items() if name in self.takes}

    def _check(self, value: Any, place: int, item: Item) -> Scored:
        try:
            return checked(self, value, place, item)
        except (RewardError, KeyboardInterrupt):
            raise
        except BaseException as error:  # reading the value runs code of the user's, such as __float__
            raise self.error(
                f"returned a value that cannot be read: reading it {describe_error(error)}", place, item
            ) from error

    def combine_parts(self, place: int, item: Item, parts: Sequence[Scored | None]) -> Scored:
        """Return the only score in `parts`, or raise an error if it is None; see `WeightedSum`."""
        (scored,) = parts
        return checked(self, None, place, item) if scored is None else scored

    def _call(self, items: Mapping[int, Item]) -> list[Any]:
        """Call the function for each item and return the results unchecked."""
        if self.batched:
            return self._call_batched(items)
        found = []
        for place, item in items.items():
            with self._blamed(place, item):
                found.append(self.function(**self.arguments([item]), **self.kwargs))
        return found

    async def _call_all(self, items: Mapping[int, Item]) -> list[Any]:
        """Call an asynchronous function for all items at the same time."""
        pid = os.getpid()

        async def call(place: int, item: Item) -> Any:
            try:
                return await self.function(**self.arguments([item]), **self.kwargs)
            except BaseException as error:  # not Ctrl-C: only the main thread gets it, and this is another
                raise self._raised(error, place, item) from error
            finally:
                end_forked_copy(pid)

        return await _side_by_side([call(*pair) for pair in items.items()])

    def _call_batched(self, items: Mapping[int, Item]) -> list[Any]:
        first = next(iter(items.items()))
        logged: dict[str, list[Any]] = {}
        more = loggers(logged, len(items)) if self.style == "trl" else {}
        with self._blamed(*first, also=" (it is a batched function; this is the first sample)"):
            values = self.function(**self.arguments(list(items.values()), **more), **self.kwargs)
            values = run_coroutine(values) if inspect.iscoroutine(values) else values
            values = with_logged(values, logged) if self.style == "trl" else values
            plain = isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__")
            listed = [] if plain or len(values) != len(items) else list(values)
        if plain:
            raise self.error("is batched but did not return a list", *first, got=shown(values))
        if len(listed) != len(items):
            got = f"{len(values)} scores for {len(items)} responses"
            raise self.error("returned a list of the wrong length", *first, got=got)
        return listed

    @contextmanager
    def _blamed(self, place: int, item: Item, also: str = "") -> Iterator[None]:
        """Convert an exception of the function to an error that names the sample."""
        try:
            with exits_raised():
                yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self._raised(error, place, item, also) from error

    def _raised(self, raised: BaseException, place: int, item: Item, also: str = "") -> RewardError:
        error = self.error(describe_error(raised) + also, place, item)
        if is_network_error(raised):
            error.remedy = RETRY_REMEDY
        return error

    def error(self, problem: str, place: int, item: Item, *, got: str | None = None) -> RewardError:
        """Return the error for one sample, with its data source and the first characters of its response."""
        row = "" if item.index is None else f", row {item.index} of the data"
        response = f"the response {item.solution_str[:HEAD_CHARACTERS]!r}"
        return RewardError(
            f"the reward function {self.name} {problem}",
            field=f"sample {place}{row}, data_source '{item.data_source}'",
            got=response if got is None else f"{got}, for {response}",
            expected="a finite number, or a dict with one under 'score'",
            remedy="fix the reward function; it must accept any text that a model can write",
        )


def scores_of(rewards: Sequence[Reward], items: Mapping[int, Item]) -> list[dict[int, Scored | None]]:
    """Return the scores of items by each reward.

    If there are several rewards, all are asynchronous, and their calls run at the same time.

    Args:
        rewards: The rewards.
        items: A dict from row number in the batch (for messages) to item.

    Returns:
        For each reward, a dict from row number to score; None if the function returned None.

    Raises:
        RewardError: A function raised an exception, or did not return a finite number or a dict with a finite
            "score".
    """
    if rewards[0].asynchronous:
        results = run_coroutine(_side_by_side([reward._call_all(items) for reward in rewards]))
    else:
        results = [reward._call(items) for reward in rewards]
    return [
        {
            place: None if value is None else reward._check(value, place, items[place])
            for place, value in zip(items, values, strict=True)
        }
        for reward, values in zip(rewards, results, strict=True)
    ]


async def _side_by_side(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Wait until all calls have ended and return their results, or raise the first failure."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for failed in filter(lambda each: isinstance(each, BaseException), found):
        raise failed
    return found


@dataclass(frozen=True, slots=True, eq=False)
class WeightedSum:
    """The weighted sum of the scores of several functions.

    The score of each function becomes a metric with the function's name. A function that returns None for a
    response is left out of the sum for that response.

    Attributes:
        terms: The name, reward and weight of each function.

    Raises:
        RewardError: There are no terms, or two terms have the same name.
    """

    terms: tuple[tuple[str, Reward, float], ...]

    def __post_init__(self) -> None:
        names = [name for name, _, _ in self.terms]
        if len(set(names)) < len(names) or not names:
            raise RewardError(
                "each function needs its own name" if names else "no function is named",
                field="custom_reward_function.terms",
                got=names,
                remedy="give one of them a label, which becomes the name of its metric",
            )

    @property
    def parts(self) -> tuple[Reward, ...]:
        """The rewards of all terms."""
        return tuple(reward for _, reward, _ in self.terms)

    @property
    def batched(self) -> bool:
        """Whether at least one of the functions scores several responses in one call."""
        return any(reward.batched for reward in self.parts)

    @property
    def reads(self) -> Reads:
        """The columns of the data that the functions read."""
        return reduce(add, (reward.reads for reward in self.parts))

    def combine_parts(self, place: int, item: Item, parts: Sequence[Scored | None]) -> Scored:
        """Return the score of a response.

        Args:
            place: The row number of the response in the batch.
            item: The response.
            parts: The scores of the functions; None for a function that does not score this response.

        Raises:
            RewardError: All parts are None.
        """
        scored = [
            (name, weight, part) for (name, _, weight), part in zip(self.terms, parts, strict=True) if part
        ]
        if not scored:
            raise self.parts[0].error("returned None, and so did all others", place, item, got="None")
        extra: dict[str, float] = {}
        for name, _, part in scored:
            extra |= {(f"{name}/{key}" if key in extra else key): value for key, value in part.extra.items()}
        extra |= {name: part.score for name, _, part in scored}
        answered = next((part for _, _, part in scored if part.reads_answers), scored[0][2])
        total = sum(weight * part.score for _, weight, part in scored)
        why = reason("; ".join(f"{name}: {part.why}" for name, _, part in scored if part.why))
        return Scored(total, extra, answered.answer, answered.reads_answers, why=why)


Scorer = Reward | WeightedSum
"""The user's reward: one function, or a weighted sum of several functions."""


def checked(reward: Reward, value: Any, place: int, item: Item) -> Scored:
    """Check the value that a reward function returned for an item, and return it as a score.

    Raises:
        RewardError: The value is neither a finite number nor a dict with a finite "score".
    """
    entries = dict(value) if isinstance(value, Mapping) else {"score": value}
    if len(entries) > MOST_ENTRIES:
        got = f"{len(entries)} entries; at most {MOST_ENTRIES} are allowed"
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
        raise reward.error("returned an entry whose name is too long or not printable", place, item, got=got)
    if not all(map(math.isfinite, (main, *extra.values()))):
        raise reward.error("returned a number that is not finite", place, item, got=shown(value))
    answer = entries.get("pred")
    if answer is None and reward.answer is not None:
        answer = reward.answer(item.solution_str, **reward.kwargs)
    reads = reward.answer is not None or "pred" in entries
    why = entries.get("why")
    if not isinstance(why, str):
        why = _compared(answer, item.ground_truth) if reads else ""
    text = None if answer is None else str(answer)[:ANSWER_CHARACTERS]
    return Scored(main, extra, text, reads, why=reason(why))


def _compared(answer: Any, truth: Any) -> str:
    """Return an explanation for a reward that only compares an answer."""
    if answer is None:
        return "no answer found"
    return f"answer {answer!s:.200}" + ("" if truth is None else f", expected {truth!s:.200}")


_REWARDS: dict[str, Reward] = {}
_SHIPPED: list[Reward] = []


def register_reward(
    *data_sources: str,
    answer: Callable[..., object] | None = None,
    bounded: bool = False,
    check: Callable[..., Sequence[str]] | None = None,
) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as the reward of data sources.

    "name*" matches all data sources that start with "name". Without data sources, the function is used only
    where the user names it. The other arguments are attributes of `Reward`.

    Raises:
        RewardError: One of the data sources already has a reward.
    """

    def register(function: Function) -> Function:
        name = f"{function.__module__}.{function.__name__}"
        reward = Reward(name, function, answer=answer, bounded=bounded, check=check)
        for data_source in data_sources:
            if data_source in _REWARDS:
                raise RewardError(
                    "the data source already has a reward",
                    field=data_source,
                    got=reward.name,
                    expected=_REWARDS[data_source].name,
                )
            _REWARDS[data_source] = reward
        _SHIPPED.append(reward)
        return function

    return register


def shipped(function: Callable[..., Any]) -> Reward:
    """Return the registered `Reward` of a function or its partial; wrap an unregistered function."""
    whole = getattr(function, "func", function)
    return next((reward for reward in _SHIPPED if reward.function is whole), Reward("", function))


def known_data_sources() -> tuple[str, ...]:
    """Return the registered data sources, sorted; a trailing * matches any suffix."""
    return tuple(sorted(_REWARDS))


def reward_for(data_source: str) -> Reward:
    """Return the reward of a data source: for the exact name, else for the longest matching "name*".

    Raises:
        RewardError: The data source has no reward.
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
        remedy="set custom_reward_function.path and custom_reward_function.name to your own function, "
        "or use one of these names in the data",
    )
