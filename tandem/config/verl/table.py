"""The table of other command lines' keys, `keys.yaml`, which says of each what it is here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Rule:
    """What is said of keys; the head of `keys.yaml` explains the fields."""

    keys: str
    now: tuple[str, ...] = ()
    values: Mapping[Any, Any] = field(default_factory=dict)
    shared: str | None = None
    nothing: str | None = None
    only: tuple[Any, ...] | None = None
    refused: str | None = None
    neutral: tuple[Any, ...] = ()
    instead: str | None = None
    gate: str | None = None
    idle: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Where keys of this rule stand in a table: renamed, nothing to act on, or not offered."""
        if self.now or self.values:
            return "renamed"
        return "not offered" if self.refused else "nothing to act on"

    def __str__(self) -> str:
        if self.now:
            share = " = value / data-parallel size" if self.shared else ""
            return " and ".join(self.now) + share
        instead = f"; {self.instead}" if self.instead else ""
        return f"{self.refused}{instead}" if self.refused else str(self.nothing)


@cache
def rule_of(name: str) -> Rule | None:
    """The rule of a key, with the names in it filled in; None where the table does not have it."""
    for pattern, rule in _rules():
        if (match := pattern.fullmatch(name)) is not None:
            return _filled(rule, match)
    return None


def former_names(name: str) -> list[str]:
    """The names that were once a key's, of those that the table spells out."""
    return [
        old
        for _, rule in _rules()
        if rule.now and not rule.shared and "*" not in rule.keys
        for old in _spelt_out(rule.keys)
        if (found := rule_of(old)) is not None and found.now == (name,)
    ]


@cache
def _rules() -> list[tuple[re.Pattern[str], Rule]]:
    rows = yaml.load(
        Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8"),
        getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    )
    return [(re.compile(_expression(row["keys"])), _rule(row)) for row in rows]


def _rule(row: Mapping[str, Any]) -> Rule:
    many = {name: tuple(row[name]) for name in ("only", "neutral") if name in row}
    now = row.get("now", ())
    return Rule(**{**row, **many, "now": (now,) if isinstance(now, str) else tuple(now)})


_TOKENS = re.compile(r"(\{[^}]*\}|\*\*|\*)")


def _expression(keys: str) -> str:
    """The regular expression of a row's keys; every {}, * and ** outside of braces is a group."""

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
