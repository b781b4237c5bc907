"""How a user's own reward function wants to be called, which the names of its parameters say.

    (prompt, response, **columns) -> float | dict | None          one response
    (prompts, responses, **columns) -> list of these              all responses of a call, columns as lists
    (prompt, responses, **columns) -> list of these               all responses to one prompt
    (prompts, completions, completion_ids, **columns) -> list     as TRL's GRPOTrainer calls reward functions
    (data_source, solution_str, ground_truth, extra_info)         as verl does, see `tandem.rewards.base`

`columns` are the columns of the data, by name; a function gets those that it names, or all, with `**`. A
dict has the key "score"; None says that the function has nothing to say of a response, which needs another
function that has. TRL's functions may name `log_extra(column, values)` and `log_metric(name, value)`. A
prompt is given as the data hold it: a text, or messages; TRL's completion of messages is a message.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from tandem.errors import RewardError

Style = Literal["verl", "one", "batch", "group", "trl"]
RESERVED = ("prompt", "prompts", "response", "responses", "completion", "completions", "completion_ids")
"""Parameters that are no columns; a column of the data but `prompt` may not have such a name."""
_TRLS = ("completions", "completion_ids", "log_extra", "log_metric")
GIVEN = frozenset((*RESERVED, *_TRLS))
"""Parameters that each call gives."""
_NOT_OFFERED = ("trainer_state", "environments")


@dataclass(frozen=True, slots=True)
class Reads:
    """The columns that a reward function reads.

    Attributes:
        needs: those that must be there; "prompt" is that of `data.prompt_key`.
        optional: further ones that it takes if they are there; None: all others.
    """

    needs: tuple[str, ...] = ()
    optional: tuple[str, ...] | None = ()

    def __add__(self, other: Reads) -> Reads:
        """What two functions read together."""
        needs = tuple(dict.fromkeys(self.needs + other.needs))
        if self.optional is None or other.optional is None:
            return Reads(needs, None)
        return Reads(needs, tuple(dict.fromkeys(self.optional + other.optional)))


VERLS = Reads(("data_source", "reward_model"), ("extra_info",))
"""What a function called as verl does reads, and what the built-in rewards do."""


def style_of(function: Callable[..., Any], field: str) -> Style:
    """How a function wants to be called.

    Raises:
        RewardError: its parameters name no such way, or two.
    """
    names = set(named_parameters(function))
    if refused := sorted(names & set(_NOT_OFFERED)):
        raise RewardError(
            f"takes {refused[0]}, which only TRL's trainer has",
            field=field,
            remedy=f"leave it out; {', '.join(_TRLS)} and the columns of the data are given",
        )
    found: list[Style] = []
    if names & {"solution_str", "solution_strs"}:
        found.append("verl")
    if "response" in names:
        found.append("one")
    if "responses" in names:
        found.append("group" if "prompt" in names else "batch")
    if names & set(_TRLS):
        found.append("trl")
    if not found and takes_all(function) and not names:
        found.append("verl")
    if len(found) != 1 or ("one" in found and "prompts" in names):
        raise RewardError(
            "does not say which responses it wants"
            if not found
            else "its parameters name two ways to call it",
            field=field,
            got=f"({', '.join(inspect.signature(function).parameters)})",
            expected="(prompt, response, **columns) for one response, (prompts, responses, **columns) for "
            "many, (prompt, responses, **columns) for all to one prompt, (completions, **columns) as TRL "
            "calls it, or verl's (data_source, solution_str, ground_truth, extra_info)",
            remedy=_meant(names) + "rename its parameters; any other is a column of the data",
        )
    return found[0]


def _meant(names: Set[str]) -> str:
    """Which parameters may be misspelt, as the beginning of a remedy."""
    known = (*RESERVED, "solution_str")
    near = {
        name: difflib.get_close_matches(name, known, n=1, cutoff=0.75) for name in sorted(names - set(known))
    }
    return "".join(f"is {name!r} the parameter {close[0]!r}? " for name, close in near.items() if close)


def named_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that a function names: neither *args nor **kwargs."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: p for name, p in inspect.signature(function).parameters.items() if p.kind not in kinds}


def takes_all(function: Callable[..., Any]) -> bool:
    """Whether a function takes any argument by name, with **kwargs."""
    found = inspect.signature(function).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found)


def reads_of(function: Callable[..., Any], style: Style, fixed: Mapping[str, Any]) -> Reads:
    """The columns that a function of this style reads; `fixed` are arguments that are none."""
    if style == "verl":
        return VERLS
    known = {*GIVEN, *fixed}
    columns = {name: p for name, p in named_parameters(function).items() if name not in known}
    needs = tuple(name for name, p in columns.items() if p.default is inspect.Parameter.empty)
    others = tuple(name for name in columns if name not in needs)
    return Reads(("prompt", *needs), None if takes_all(function) else others)


def logging_like_trl(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with what it wants of `log_extra` and `log_metric`: what it logs comes with its scores."""
    wants = [
        name
        for name in ("log_extra", "log_metric")
        if name in named_parameters(function) or takes_all(function)
    ]

    def begin(given: dict[str, Any]) -> dict[str, list[Any]]:
        logged: dict[str, list[Any]] = {}
        count = len(next(iter(given.values())))

        def log_extra(column: str, values: Sequence[Any]) -> None:
            logged[column] = list(values)

        def log_metric(name: str, value: float) -> None:
            logged[name] = [value] * count

        given |= {name: {"log_extra": log_extra, "log_metric": log_metric}[name] for name in wants}
        return logged

    def beside(scores: Sequence[Any], logged: Mapping[str, list[Any]]) -> list[Any]:
        rows = zip(*logged.values(), strict=True) if logged else iter(() for _ in scores)
        found = []
        for score, row in zip(scores, rows, strict=True):
            named = dict(zip(logged, row, strict=True))
            texts = [f"{name}: {value}" for name, value in named.items() if isinstance(value, str)]
            named |= {"why": "; ".join(texts)} if texts else {}
            given = score if isinstance(score, Mapping) else {"score": score}
            found.append(score if score is None else {**named, **given})
        return found

    @functools.wraps(function)
    def call(**given: Any) -> list[Any]:
        logged = begin(given)
        return beside(function(**given), logged)

    @functools.wraps(function)
    async def call_async(**given: Any) -> list[Any]:
        logged = begin(given)
        return beside(await function(**given), logged)

    return call_async if inspect.iscoroutinefunction(function) else call
