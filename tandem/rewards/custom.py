"""Load a user's reward function from a file, and check its arguments before training."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from tandem.config.rewards import CustomRewardConfig
from tandem.errors import ConfigError, RewardError
from tandem.loading import CODE_FILES, execute_file, import_named
from tandem.rewards.base import Reward, Scorer, WeightedSum, shipped
from tandem.rewards.calling import describe_error, exits_raised, limited, load_seconds
from tandem.rewards.signatures import (
    GIVEN,
    VERL_GIVES,
    Reads,
    named_parameters,
    reads_of,
    style_of,
    takes_all,
)


@dataclass(frozen=True, slots=True, eq=False)
class CustomReward(Reward):
    """A reward function that the user wrote.

    Other processes load the function again from its file, because objects that its module creates on import
    (clients, locks, models) may not be picklable.

    Attributes:
        source: The arguments of `load_custom`.
    """

    source: tuple[str, str, dict[str, Any]] = ("", "", {})

    def __reduce__(self) -> tuple[Any, ...]:
        return load_custom, self.source


def own_reward(config: CustomRewardConfig, timeout: float = math.inf) -> Scorer | None:
    """Return the user's reward; None if the config uses the built-in rewards of the data sources.

    Args:
        config: The section `custom_reward_function`.
        timeout: The time limit of a call, in seconds; see `load_custom`.

    Raises:
        RewardError: A function cannot be loaded (see `load_custom`), or two functions have the same name.
    """
    if not config.terms:
        if config.path is None:
            return None
        return load_custom(config.path, config.name, config.reward_kwargs, timeout)
    terms = []
    for term in config.terms:
        reward = load_custom(str(term.path or config.path), term.name, term.reward_kwargs, timeout)
        terms.append((term.label or term.name, reward, term.weight))
    return WeightedSum(tuple(terms))


def load_custom(
    path: str,
    name: str = "compute_score",
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = math.inf,
) -> Reward:
    """Load a user's reward function.

    Args:
        path: A Python file, or the dotted name of a module that can be imported.
        name: The name of the function in the file or module.
        kwargs: Additional arguments of every call.
        timeout: The time limit of a call, in seconds. `load_seconds` derives the limit for loading from it.

    Raises:
        RewardError: The file, module or function does not exist; the file raises an exception or takes too
            long to load; or the function has none of the signatures in `tandem.rewards.signatures`.
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
    known, style = shipped(function), style_of(function, f"custom_reward_function {name}")
    needs: tuple[str, ...] = ()
    if style != "verl":
        _check_names(function, fixed)
        needs = tuple(known.check(**fixed)) if known.check else ()
    reward = CustomReward(
        f"{name} ({path})",
        function,
        fixed,
        answer=known.answer,
        bounded=known.bounded,
        style=style,
        reads=Reads(needs) + reads_of(function, style, fixed),
        takes=None if takes_all(function) else frozenset(named_parameters(function)) - fixed.keys(),
        source=source,
    )
    if style == "verl":
        _check_signature(reward)
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
            f"loading it {describe_error(error)}",
            field="custom_reward_function.path",
            got=path,
            expected="a Python file, or the dotted name of a module, that can be imported",
            remedy="raise reward.timeout, or let the file load what it needs at the first call"
            if isinstance(error, TimeoutError)
            else "fix this error; Python must be able to import the file",
        ) from error


def _check_signature(reward: Reward) -> None:
    names = [f"{name}s" for name in VERL_GIVES] if reward.batched else VERL_GIVES
    signature = inspect.signature(reward.function)
    try:
        signature.bind(**dict.fromkeys(names), **reward.kwargs)
    except TypeError as error:
        raise RewardError(
            f"cannot be called as needed: {error}",
            field=f"custom_reward_function {reward.name}",
            got=str(signature),
            expected=f"({', '.join([*names, *reward.kwargs])})",
            remedy="give the function parameters with these names, or **kwargs; they include the entries of "
            "custom_reward_function.reward_kwargs",
        ) from error


def _check_names(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check that the function accepts the arguments, and that calls do not already pass them."""
    free = [name for name in named_parameters(function) if name not in GIVEN]
    for name in given:
        if name in GIVEN or not (name in free or takes_all(function)):
            close = difflib.get_close_matches(name, free, n=1)
            raise RewardError(
                "each call passes this argument" if name in GIVEN else "the function has no such parameter",
                field=f"custom_reward_function.reward_kwargs.{name}",
                expected=f"one of {', '.join(free) or '(it has no other parameters)'}",
                remedy=f"did you mean {close[0]}?" if close else None,
            )


def _check_choices(reward: Reward) -> None:
    """Check arguments against the Literal annotations of the function's parameters."""
    try:
        parameters = inspect.signature(reward.function, eval_str=True).parameters
    except NameError:  # an annotation that only a type checker can read
        return
    for name, value in reward.kwargs.items():
        annotation = parameters[name].annotation if name in parameters else None
        if get_origin(annotation) is Literal and value not in get_args(annotation):
            raise RewardError(
                "this value is not one of the choices",
                field=f"custom_reward_function.reward_kwargs.{name}",
                got=value,
                expected=f"one of {', '.join(map(str, get_args(annotation)))}",
            )
