"""Convert another system's settings to a config of Tandem, with a table of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.config.schema import keys
from tandem.config.section import Section
from tandem.peers.table import REFUSED, Reading, Rule


@dataclass
class Peer:
    """Another system's settings while they are converted to a config.

    Attributes:
        command: the command of Tandem that the config is for.
        root: the type of the config.
        table: the rule of each setting.
        defaults: the defaults of the settings.
        given: the settings that the user gave.
        config: Tandem's keys and values so far.
        rows: the translations of the given settings so far.
        notes: sentences about calculations, and about values that the user must still fill in.
        lost: sentences about the other system's defaults that Tandem does not support.
    """

    command: str
    root: type[Section]
    table: Mapping[str, Rule]
    defaults: Mapping[str, Any]
    given: Mapping[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[Reading] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.defaults.get(name))

    def put(self, key: str, value: Any, *, always: bool = False) -> None:
        """Set a key if the value differs from the key's default, or always if `always`."""
        known = keys(self.root)
        if key in known and (always or known[key].inherits is not None or known[key].default != value):
            self.config[key] = value

    def refuse(self, name: str, why: str) -> None:
        """Record that a setting is not supported. This replaces an earlier record of the setting.

        For a setting that the user did not give, a sentence is added to `lost`.
        """
        if name not in self.given:
            self.lost.append(f"{name}={self[name]}, the default there, is not supported: {why}.")
            return
        self.rows = [row for row in self.rows if row.name != name]
        self.rows.append(Reading(name, self[name], "refused", why))

    def take(self, place: Callable[[str], str] = str) -> None:
        """Convert every setting that corresponds to exactly one key, and record all given settings in `rows`.

        Args:
            place: a function from a key of `tandem train` to its path in this config.
        """
        for name in [*self.table, *(name for name in self.given if name not in self.table)]:
            rule = self.table.get(name)
            if rule is None:
                self.refuse(name, "the supported version does not have this setting")
            elif rule.is_one_key:
                self._key(name, rule, place(", ".join(rule.now)))
            elif name not in self.given:
                continue
            elif rule.computed is not None:
                here = f"{place(', '.join(rule.now))}: {rule.computed}"
                self.rows.append(Reading(name, self[name], "renamed", here))
            elif rule.nothing is not None:
                self.rows.append(Reading(name, self[name], "ignored", rule.nothing))
            elif self[name] not in (None, False, self.defaults.get(name)):
                self.refuse(name, str(rule.refused))

    def _key(self, name: str, rule: Rule, key: str) -> None:
        value = self[name]
        new = rule.value(value)
        if new is None:
            if name in self.given:
                self.rows.append(Reading(name, value, "ignored", "this value needs no key here"))
            return
        if new is REFUSED:
            self.refuse(name, rule.why or "this value is not supported")
            return
        if key not in keys(self.root):
            if name in self.given:
                self.refuse(name, "this trainer has no such setting")
            return
        self.put(key, new, always=name in self.given)
        if name in self.given:
            self.rows.append(Reading(name, value, "renamed", f"{key}={new}"))
