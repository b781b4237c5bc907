"""Translate config keys of other programs to Tandem's keys; keys are renamed, ignored or refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import ConfigError
from tandem.peers.table import Reading, Rule


@dataclass(frozen=True, slots=True)
class Translation:
    """Given values, keyed by Tandem's config keys.

    Attributes:
        given: a dict from Tandem's dotted key to value.
        origins: a dict from Tandem's dotted key to the key that was given.
        errors: one error for each key that is refused or cannot be translated.
        readings: one reading for each key that was translated.
    """

    given: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    errors: list[ConfigError] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    @property
    def notices(self) -> list[str]:
        """One sentence for each renamed key, and one sentence for each reason why keys are ignored."""
        reasons: dict[str, list[str]] = {}
        renamed = []
        for reading in self.readings:
            if reading.verdict == "renamed":
                renamed.append(f"{reading.name} is {reading.sentence} here.")
            else:
                reasons.setdefault(reading.sentence, []).append(reading.name)
        return renamed + [f"{', '.join(names)}: ignored: {why}." for why, names in reasons.items()]


Rules = Callable[[str], Rule | None]
"""A function from a key to its rule; None for a key without a rule."""


def translate(
    given: Mapping[str, Any], known: Collection[str], rules: Rules, devices_of: Callable[[str], int]
) -> Translation:
    """Translate the given values to Tandem's keys.

    Args:
        given: a dict from dotted key to value. Each key is a Tandem key or has a rule.
        known: all Tandem keys.
        rules: returns the rule of a foreign key, or of a value of a Tandem key.
        devices_of: returns the data-parallel size of a role.
    """
    into = _Translator(given, known, rules, devices_of)
    for name in sorted(given, key=lambda name: name not in known):
        into.take(name, name, given[name])
    return into.found


@dataclass
class _Translator:
    given: Mapping[str, Any]
    known: Collection[str]
    rules: Rules
    devices_of: Callable[[str], int]
    found: Translation = field(default_factory=Translation)

    def take(self, origin: str, name: str, value: Any, shared: str = "") -> None:
        """Translate the key `name`, which comes from the given key `origin`, and record the result."""
        rule = self.rules(name)
        if name in self.known and not (rule and _in(value, rule.only or ())):
            self._set(origin, name, rule.value(value) if rule else value, shared)
        elif rule is None:
            self._fail(origin, value, f"this is another name of {name}, which is not a key here")
        elif value is None:
            return
        elif rule.gate is not None and self._closed(rule, name):
            self._ignore(origin, value, f"{rule.gate} is off")
        elif rule.idle and all(self.given.get(key) in (None, *those) for key, those in rule.idle.items()):
            words = " and ".join(f"{key} is {those[0]}" for key, those in rule.idle.items())
            self._ignore(origin, value, f"it has no effect while {words}")
        elif rule.nothing is not None:
            self._nothing(origin, value, rule)
        elif _in(value, rule.neutral) or value in ("", [], {}):
            self._ignore(origin, value, f"{rule.refused or 'this value turns it off'}")
        elif rule.now:
            self._rename(origin, value, rule)
        else:
            self._refuse(origin, value, rule)

    def _set(self, origin: str, name: str, value: Any, shared: str) -> None:
        known = self.found.given
        before = self.found.origins.get(name)
        if before is not None and known[name] != value:
            self._fail(origin, value, f"this contradicts {before}")
            return
        known[name], self.found.origins[name] = value, origin
        if origin != name or value != self.given[origin]:
            self.found.readings.append(
                Reading(origin, self.given[origin], "renamed", f"{name}={value}{shared}")
            )

    def _ignore(self, origin: str, value: Any, why: str) -> None:
        self.found.readings.append(Reading(origin, value, "ignored", why))

    def _closed(self, rule: Rule, name: str) -> bool:
        """Return whether the key belongs to a feature that is turned off.

        If the feature is on and refused, only its switch is reported as an error.
        """
        if name == rule.gate:
            return False
        return rule.refused is not None or not self.given.get(str(rule.gate))

    def _nothing(self, origin: str, value: Any, rule: Rule) -> None:
        if rule.only is None or _in(value, rule.only) or _interpolated(value):
            self._ignore(origin, value, str(rule.nothing))
        else:
            self._refuse(origin, value, rule, expected=rule.only)

    def _rename(self, origin: str, value: Any, rule: Rule) -> None:
        shared = ""
        if rule.shared is not None:
            devices = self.devices_of(rule.shared)
            if type(value) is not int or value < 1 or value % devices:
                wanted = "integer >= 1" if devices == 1 else f"a multiple of the {devices} devices"
                self._fail(origin, value, "this cannot be divided evenly", wanted, f"use {rule.now[0]}")
                return
            shared = f" ({value} over {devices} data-parallel device{'s' * (devices > 1)})"
            value //= devices
        for name in rule.now:
            self.take(origin, name, rule.value(value), shared)

    def _refuse(self, origin: str, value: Any, rule: Rule, expected: tuple[Any, ...] = ()) -> None:
        if _interpolated(value):
            self._ignore(origin, value, str(rule.refused))
            return
        words = " or ".join(str(item).lower() for item in expected or rule.neutral)
        self._fail(origin, value, str(rule.refused or rule.nothing), words, rule.instead)

    def _fail(
        self, origin: str, value: Any, problem: str, expected: str = "", remedy: str | None = None
    ) -> None:
        remedy = remedy or f"remove {origin}"
        error = ConfigError(problem, field=origin, got=value, expected=expected or None, remedy=remedy)
        self.found.errors.append(error)


def _in(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether the value is in `values`, where True and 1 differ, and False and 0 differ."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in values)


def _interpolated(value: Any) -> bool:
    """Return whether the value refers to another key's value, as in complete config files of verl."""
    return isinstance(value, str) and value.startswith("${")
