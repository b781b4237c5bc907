"""Read the tables of other systems' settings, which are YAML files in this folder.

A row of a table maps a setting to Tandem. The comment at the top of each file explains the fields of a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

REFUSED = object()
"""The marker for a value that is not supported."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of a table: the rule for one or several settings. The fields have the tables' names."""

    keys: str
    now: tuple[str, ...] = ()
    values: Mapping[Any, Any] = field(default_factory=dict)
    default: Any = None
    why: str = ""
    computed: str | None = None
    shared: str | None = None
    acts: str | None = None
    nothing: str | None = None
    only: tuple[Any, ...] | None = None
    refused: str | None = None
    neutral: tuple[Any, ...] = ()
    instead: str | None = None
    gate: str | None = None
    idle: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The result for keys with this rule: "renamed", "ignored" or "not supported"."""
        if self.now or self.values:
            return "renamed"
        return "not supported" if self.refused else "ignored"

    @property
    def is_one_key(self) -> bool:
        """Whether the setting corresponds to exactly one Tandem key."""
        return (self.computed, self.nothing, self.refused) == (None, None, None)

    @property
    def reason(self) -> str:
        """The reason for the rule, or the conversion of values, as a text."""
        return self.computed or self.acts or self.nothing or self.refused or self.why

    def value(self, given: Any) -> Any:
        """Convert a value of the other system to Tandem's value."""
        return self.values.get(given, given) if isinstance(given, str | int | float | bool | None) else given

    def __str__(self) -> str:
        if self.now:
            share = " = value / data-parallel size" if self.shared else ""
            return " and ".join(self.now) + share
        instead = f"; {self.instead}" if self.instead else ""
        return f"{self.refused}{instead}" if self.refused else str(self.nothing)


Verdict = Literal["refused", "renamed", "acts", "ignored"]
"""The result of translating a setting.

"refused": the setting would change the run, but is not supported. "renamed": Tandem has a key with another
name. "acts": Tandem accepts the same name. "ignored": the setting has no effect in Tandem.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """A given setting of another system, and its translation.

    Attributes:
        name: the setting's name as given: a key, an option, or an environment variable.
        value: the given value.
        verdict: the result; see `Verdict`.
        sentence: Tandem's key and value, or the reason.
    """

    name: str
    value: Any
    verdict: Verdict
    sentence: str


def read_table(name: str) -> Any:
    """Return the content of a YAML file in this package."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def by_name(rows: Iterable[Mapping[str, Any]]) -> dict[str, Rule]:
    """Return a dict from setting to rule, for all settings in the rows."""
    return {name: rule for rule in map(_rule, rows) for name in _spelt_out(rule.keys)}


@cache
def rule_of(name: str) -> Rule | None:
    """Return the rule of a key of verl, with its wildcards replaced; None if there is no rule."""
    for pattern, rule in _verls():
        if (match := pattern.fullmatch(name)) is not None:
            return _filled(rule, match)
    return None


def former_names(name: str) -> list[str]:
    """Return the former names of a key that verl's table lists without wildcards."""
    return [
        old
        for _, rule in _verls()
        if rule.now and not rule.shared and "*" not in rule.keys
        for old in _spelt_out(rule.keys)
        if (found := rule_of(old)) is not None and found.now == (name,)
    ]


@cache
def _verls() -> list[tuple[re.Pattern[str], Rule]]:
    return [(re.compile(_expression(rule.keys)), rule) for rule in map(_rule, read_table("verl.yaml"))]


def _rule(row: Mapping[str, Any]) -> Rule:
    found: dict[str, Any] = {**row, "values": {**row.get("values", {})}}
    found["values"] |= dict.fromkeys(found.pop("except", ()), REFUSED)
    found |= {name: tuple(row[name]) for name in ("only", "neutral") if name in row}
    now = row.get("now", ())
    return Rule(**found | {"now": (now,) if isinstance(now, str) else tuple(now)})


_TOKENS = re.compile(r"(\{[^}]*\}|\*\*|\*)")


def _expression(keys: str) -> str:
    """Return the regular expression for the keys of a row.

    Every {}, * and ** outside of braces is a group.
    """

    def part(text: str) -> str:
        if text.startswith("{"):
            inside = (_stars(choice) for choice in text[1:-1].split(","))
            return f"({'|'.join(inside)})"
        return f"({_stars(text)})" if text.startswith("*") else re.escape(text)

    return "".join(part(text) for text in _TOKENS.split(keys))


def _stars(text: str) -> str:
    return re.escape(text).replace(r"\*\*", ".+").replace(r"\*", r"[^.]+")


def _spelt_out(keys: str) -> list[str]:
    names = [""]
    for text in _TOKENS.split(keys):
        choices = text[1:-1].split(",") if text.startswith("{") else [text]
        names = [name + choice for name in names for choice in choices]
    return names


def _filled(rule: Rule, match: re.Match[str]) -> Rule:
    def fill(text: str) -> str:
        return re.sub(r"<(\d)>", lambda number: match[int(number[1])], text)

    return replace(
        rule,
        keys=match.string,
        now=tuple(fill(name) for name in rule.now),
        gate=None if rule.gate is None else fill(rule.gate),
        idle={fill(name): values for name, values in rule.idle.items()},
    )
