"""A user's own reward function, loaded from a file and tried for its arguments before training."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from tandem.errors import ConfigError, RewardError
from tandem.loading import CODE_FILES, execute_file, import_named
from tandem.rewards.base import Reward, shipped
from tandem.rewards.calling import exits_raised, limited, load_seconds, told
from tandem.rewards.items import Item
from tandem.rewards.signatures import (
    GIVEN,
    RESERVED,
    Reads,
    Style,
    logging_like_trl,
    named_parameters,
    reads_of,
    style_of,
    takes_all,
)

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED_PARAMETERS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True, slots=True, eq=False)
class CustomReward(Reward):
    """A user's own reward function. In another process it is loaded anew, for what its module made on
    import (clients, locks, models) need not be able to travel.

    Attributes:
        source: the arguments of `load_custom`.
    """

    source: tuple[str, str, dict[str, Any]] = ("", "", {})

    def __reduce__(self) -> tuple[Any, ...]:
        return load_custom, self.source


@dataclass(frozen=True, slots=True, eq=False)
class ColumnReward(CustomReward):
    """A user's own reward function that reads columns of the data by name.

    Attributes:
        style: how it is called; not verl's way.
        takes: the parameters that it names; None: it takes all.
        needs: columns without which its arguments do not do.
    """

    style: Style = "one"
    takes: frozenset[str] | None = None
    needs: tuple[str, ...] = ()

    @property
    def batched(self) -> bool:
        return self.style != "one"

    @property
    def grouped(self) -> bool:
        return self.style == "group"

    @property
    def reads(self) -> Reads:
        return Reads(self.needs, ()) + reads_of(self.function, self.style, self.kwargs)

    def arguments(self, item: Item) -> dict[str, Any]:
        return self._taken({**_beside(item), "prompt": item.columns["prompt"], "response": item.solution_str})

    def batch_arguments(self, items: Sequence[Item]) -> dict[str, Any]:
        texts, prompts = [item.solution_str for item in items], [item.columns["prompt"] for item in items]
        names = dict.fromkeys(name for item in items for name in _beside(item))
        given: dict[str, Any] = {name: [item.columns.get(name) for item in items] for name in names}
        if self.style == "trl":
            given |= {"prompts": prompts, "completion_ids": [item.token_ids for item in items]}
            given["completions"] = list(map(_completion, prompts, texts))
        elif self.style == "group":
            given |= {"prompt": prompts[0], "responses": texts}
        else:
            given |= {"prompts": prompts, "responses": texts}
        return self._taken(given)

    def _taken(self, given: dict[str, Any]) -> dict[str, Any]:
        return given if self.takes is None else {name: v for name, v in given.items() if name in self.takes}


def _beside(item: Item) -> dict[str, Any]:
    """The columns of a row that are given by their names."""
    return {name: value for name, value in item.columns.items() if name not in RESERVED}


def _completion(prompt: Any, text: str) -> Any:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def load_custom(
    path: str,
    name: str = "compute_score",
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = math.inf,
) -> Reward:
    """A user's own reward function.

    Args:
        path: a Python file, or the dotted name of an importable module.
        name: the function in it.
        kwargs: further arguments of every call.
        timeout: seconds of a call; `load_seconds` tells how long the file may take to load then.

    Raises:
        RewardError: no such file, module or function; the file raised, or takes too long; the function cannot
            be called in one of the ways that `tandem.rewards.signatures` names.
    """
    module = _module(path, timeout)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        close = difflib.get_close_matches(name, functions, n=1)
        raise RewardError(
            "no such function",
            field="custom_reward_function.name",
            got=f"{name} in {path}",
            expected=f"one of {', '.join(functions) or '(the file defines none)'}",
            remedy=f"custom_reward_function.name={close[0]}" if close else None,
        )
    file = Path(path).expanduser()
    source = (str(file.absolute()) if file.is_file() else path, name, dict(kwargs or {}))
    fixed, given = source[2], function
    if isinstance(given, functools.partial) and not given.args and not vars(given):
        function, fixed = given.func, {**given.keywords, **fixed}
    known = shipped(function)
    style, shown = style_of(function, f"custom_reward_function {name}"), f"{name} ({path})"
    own: dict[str, Any] = {"answer": known.answer, "bounded": known.bounded, "source": source}
    if style == "verl":
        reward = CustomReward(shown, function, fixed, **own)
        _check_signature(reward)
    else:
        _check_names(function, fixed)
        takes = None if takes_all(function) else frozenset(named_parameters(function)) - fixed.keys()
        called = logging_like_trl(function) if style == "trl" else function
        needs = tuple(known.check(**fixed)) if known.check else ()
        reward = ColumnReward(shown, called, fixed, style=style, takes=takes, needs=needs, **own)
    _check_choices(reward)
    return reward


def _module(path: str, timeout: float) -> ModuleType:
    file = Path(path).expanduser()
    is_file = file.suffix in CODE_FILES or "/" in path
    if is_file and not file.is_file():
        raise RewardError("no such file", field="custom_reward_function.path", got=path)
    try:
        with exits_raised(), limited(load_seconds(timeout), path):
            if not is_file:
                return import_named(path)
            return execute_file(file.resolve(), f"custom_reward_function.{file.stem}")
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RewardError(
            f"loading it {told(error)}",
            field="custom_reward_function.path",
            got=path,
            expected="a Python file, or the dotted name of a module, that can be imported",
            remedy="raise reward.timeout, or let the file load what it needs at the first call"
            if isinstance(error, TimeoutError)
            else None,
        ) from error


def _check_signature(reward: Reward) -> None:
    names = BATCHED_PARAMETERS if reward.batched else PARAMETERS
    signature = inspect.signature(reward.function)
    try:
        signature.bind(**dict.fromkeys(names), **reward.kwargs)
    except TypeError as error:
        raise RewardError(
            f"cannot be called as needed: {error}",
            field=f"custom_reward_function {reward.name}",
            got=str(signature),
            expected=f"({', '.join([*names, *reward.kwargs])})",
            remedy="take these arguments by these names, or any with **kwargs; the entries of "
            "custom_reward_function.reward_kwargs are among them",
        ) from error


def _check_names(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuses arguments that a function has no parameter for, or that each call gives it anyway."""
    free = [name for name in named_parameters(function) if name not in GIVEN]
    for name in given:
        if name in GIVEN or not (name in free or takes_all(function)):
            close = difflib.get_close_matches(name, free, n=1)
            raise RewardError(
                "is given by each call" if name in GIVEN else "the function has no such parameter",
                field=f"custom_reward_function.reward_kwargs.{name}",
                expected=f"one of {', '.join(free) or '(it has no other parameters)'}",
                remedy=f"did you mean {close[0]}?" if close else None,
            )


def _check_choices(reward: Reward) -> None:
    """Refuses a value that is none of those which the function's signature names with Literal."""
    try:
        parameters = inspect.signature(reward.function, eval_str=True).parameters
    except NameError:  # an annotation that only a type checker can read
        return
    for name, value in reward.kwargs.items():
        choices = get_args(parameters[name].annotation) if name in parameters else ()
        literal = bool(choices) and get_origin(parameters[name].annotation) is Literal
        if literal and value not in choices:
            raise RewardError(
                "no such choice",
                field=f"custom_reward_function.reward_kwargs.{name}",
                got=value,
                expected=f"one of {', '.join(map(str, choices))}",
            )
