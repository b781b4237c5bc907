"""The signatures of a user's reward function. The names of its parameters select the signature.

    (prompt, response, **columns) -> float | dict | None          one response
    (prompts, responses, **columns) -> list of these              all responses of a call, columns as lists
    (prompt, responses, **columns) -> list of these               all responses to one prompt
    (prompts, completions, completion_ids, **columns) -> list     as TRL's GRPOTrainer calls reward functions
    (data_source, solution_str, ground_truth, extra_info)         as in verl, see `tandem.rewards.base`

`columns` are columns of the data, passed by keyword. A function gets the columns that its parameters name, or
all columns if it has a `**` parameter. A dict must have the key "score". None means that the function does
not score this response, so another function must. Functions written for TRL may also have the parameters
`log_extra(column, values)` and `log_metric(name, value)`. A prompt is passed as in the data: text or
messages. If the prompt has messages, a TRL completion is a message too.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from tandem.errors import RewardError
from tandem.rewards.items import Item

Style = Literal["verl", "one", "batch", "group", "trl"]
RESERVED = ("prompt", "prompts", "response", "responses", "completion", "completions", "completion_ids")
"""Parameters that are not columns. A column of the data must not have such a name, except `prompt`."""
_TRLS = ("completions", "completion_ids", "log_extra", "log_metric")
GIVEN = frozenset((*RESERVED, *_TRLS))  # parameters that each call passes
_NOT_OFFERED = ("trainer_state", "environments")
_MARKS: Mapping[Style, Sequence[str]] = {
    "verl": ("solution_str", "solution_strs"),
    "one": ("response",),
    "batch": ("responses",),
    "trl": _TRLS,
}
"""Parameters that identify a signature. One such parameter is enough."""
_FACTS: Mapping[str, Callable[[Item], Any]] = {
    "data_source": lambda item: item.data_source,
    "solution_str": lambda item: item.solution_str,
    "ground_truth": lambda item: item.ground_truth,
    "extra_info": lambda item: dict(item.extra_info),
    "prompt": lambda item: item.columns["prompt"],
    "response": lambda item: item.solution_str,
    "completion": lambda item: _completion(item.columns["prompt"], item.solution_str),
    "completion_id": lambda item: item.token_ids,
}
"""Arguments about the response. A call for several responses gets lists, under the plural of the name."""
VERL_GIVES = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_GIVES = ("prompt", "completion", "completion_id")


@dataclass(frozen=True, slots=True)
class Reads:
    """The columns that a reward function reads.

    Attributes:
        needs: The columns that must exist; "prompt" is the column of `data.prompt_key`.
        optional: Columns that the function accepts if they exist; None: all other columns.
    """

    needs: tuple[str, ...] = ()
    optional: tuple[str, ...] | None = ()

    def __add__(self, other: Reads) -> Reads:
        """Return the columns that at least one of two functions reads."""
        needs = tuple(dict.fromkeys(self.needs + other.needs))
        if self.optional is None or other.optional is None:
            return Reads(needs, None)
        return Reads(needs, tuple(dict.fromkeys(self.optional + other.optional)))


VERLS = Reads(("data_source", "reward_model"), ("extra_info",))
"""The columns that built-in rewards and functions with verl's signature read."""


def style_of(function: Callable[..., Any], field: str) -> Style:
    """Return the signature by which a function must be called.

    Args:
        function: The function.
        field: The name of the function in messages.

    Raises:
        RewardError: The parameters match no signature, or two signatures.
    """
    names = set(named_parameters(function))
    if refused := sorted(names & set(_NOT_OFFERED)):
        raise RewardError(
            f"takes {refused[0]}, which only TRL's trainer can pass",
            field=field,
            remedy=f"remove this parameter; a function can take {', '.join(_TRLS)} and columns of the data",
        )
    found = [style for style, marks in _MARKS.items() if not names.isdisjoint(marks)]
    if not found and takes_all(function) and not names:
        found = ["verl"]
    if len(found) != 1 or ("one" in found and "prompts" in names):
        raise RewardError(
            "the parameters do not say which responses the function needs"
            if not found
            else "the parameters name two ways to call the function",
            field=field,
            got=f"({', '.join(inspect.signature(function).parameters)})",
            expected="(prompt, response, **columns) for one response, (prompts, responses, **columns) for "
            "many, (prompt, responses, **columns) for all to one prompt, (completions, **columns) as TRL "
            "calls it, or verl's (data_source, solution_str, ground_truth, extra_info)",
            remedy=_meant(names) + "rename the parameters; any other name is a column of the data",
        )
    return "group" if found == ["batch"] and "prompt" in names else found[0]


def _meant(names: Set[str]) -> str:
    """Return "did you mean" questions about parameters that may be misspelled, to start a remedy."""
    known = (*RESERVED, "solution_str")
    near = {
        name: difflib.get_close_matches(name, known, n=1, cutoff=0.75) for name in sorted(names - set(known))
    }
    return "".join(f"is {name!r} the parameter {close[0]!r}? " for name, close in near.items() if close)


def named_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a function, without *args and **kwargs."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: p for name, p in inspect.signature(function).parameters.items() if p.kind not in kinds}


def takes_all(function: Callable[..., Any]) -> bool:
    """Return whether a function has a `**` parameter."""
    found = inspect.signature(function).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found)


def arguments(style: Style, items: Sequence[Item], *, several: bool) -> dict[str, Any]:
    """Return the arguments of a call for some items.

    Args:
        style: The signature of the function.
        items: The items.
        several: Whether the function expects lists instead of the values of one item.
    """
    gives = {"verl": VERL_GIVES, "trl": TRL_GIVES}.get(style, ("prompt", "response"))
    rows = [{name: _FACTS[name](item) for name in gives} for item in items]
    columns = [{} if style == "verl" else _columns(item) for item in items]
    if not several:
        return columns[0] | rows[0]
    names = dict.fromkeys(name for row in columns for name in row)
    given: dict[str, Any] = {name: [row.get(name) for row in columns] for name in names}
    given |= {f"{name}s": [row[name] for row in rows] for name in gives}
    if style == "group":
        given["prompt"] = given.pop("prompts")[0]
    return given


def _columns(item: Item) -> dict[str, Any]:
    return {name: value for name, value in item.columns.items() if name not in RESERVED}


def _completion(prompt: Any, text: str) -> Any:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def reads_of(function: Callable[..., Any], style: Style, fixed: Mapping[str, Any]) -> Reads:
    """Return the columns that a function reads; the arguments in `fixed` are not columns."""
    if style == "verl":
        return VERLS
    known = {*GIVEN, *fixed}
    columns = {name: p for name, p in named_parameters(function).items() if name not in known}
    needs = tuple(name for name, p in columns.items() if p.default is inspect.Parameter.empty)
    others = tuple(name for name in columns if name not in needs)
    return Reads(("prompt", *needs), None if takes_all(function) else others)


def loggers(logged: dict[str, list[Any]], count: int) -> dict[str, Callable[..., None]]:
    """Return TRL's logging functions, which store their values for `count` responses in `logged`."""

    def log_extra(column: str, values: Sequence[Any]) -> None:
        logged[column] = list(values)

    def log_metric(name: str, value: float) -> None:
        logged[name] = [value] * count

    return {"log_extra": log_extra, "log_metric": log_metric}


def with_logged(scores: Sequence[Any], logged: Mapping[str, list[Any]]) -> list[Any]:
    """Add logged values to scores: numbers under their names, and texts as the explanation."""
    rows = zip(*logged.values(), strict=True) if logged else iter(() for _ in scores)
    found = []
    for score, row in zip(scores, rows, strict=True):
        named = dict(zip(logged, row, strict=True))
        texts = [f"{name}: {value}" for name, value in named.items() if isinstance(value, str)]
        named |= {"why": "; ".join(texts)} if texts else {}
        given = score if isinstance(score, Mapping) else {"score": score}
        found.append(score if score is None else {**named, **given})
    return found
