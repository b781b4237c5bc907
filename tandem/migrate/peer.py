"""Another system's settings as a config of Tandem: a table says of each what it is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.config.schema import keys
from tandem.config.section import Section
from tandem.peers.table import REFUSED, Reading, Rule


@dataclass
class Peer:
    """Another system's settings, on their way to a config.

    Attributes:
        command: of Tandem's, which the config is of.
        root: the config that they become.
        table: what each setting is here.
        defaults: what a setting is that nobody gives.
        given: what was given.
        config: Tandem's keys and values so far.
        rows: what became of the given settings so far.
        notes: the arithmetic, and what is still to be filled in, one sentence each.
        lost: what is not taken over of the defaults, one sentence each.
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
        """Set a key whose default is another one; `always`, any."""
        known = keys(self.root)
        if key in known and (always or known[key].inherits is not None or known[key].default != value):
            self.config[key] = value

    def refuse(self, name: str, why: str) -> None:
        """Say that a setting is not taken over, in place of what was said of it before; of one that nobody
        gave, in a note."""
        if name not in self.given:
            self.lost.append(f"{name}={self[name]}, the default there, is not taken over: {why}.")
            return
        self.rows = [row for row in self.rows if row.name != name]
        self.rows.append(Reading(name, self[name], "refused", why))

    def take(self, place: Callable[[str], str] = str) -> None:
        """Take over every setting that is one key, and say of the given ones what became of them.

        Args:
            place: where a key of `tandem train` lies in this config.
        """
        for name in [*self.table, *(name for name in self.given if name not in self.table)]:
            rule = self.table.get(name)
            if rule is None:
                self.refuse(name, "not a setting of the version that the table is of")
            elif rule.is_one_key:
                self._key(name, rule, place(", ".join(rule.now)))
            elif name not in self.given:
                continue
            elif rule.reckoned is not None:
                here = f"{place(', '.join(rule.now))}: {rule.reckoned}"
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
                self.rows.append(Reading(name, value, "ignored", "asks for nothing here"))
            return
        if new is REFUSED:
            self.refuse(name, rule.why or "this value is not offered")
            return
        if key not in keys(self.root):
            if name in self.given:
                self.refuse(name, "there is no such setting for this trainer")
            return
        self.put(key, new, always=name in self.given)
        if name in self.given:
            self.rows.append(Reading(name, value, "renamed", f"{key}={new}"))
