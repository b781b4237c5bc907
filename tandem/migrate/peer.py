"""Another system's settings as a config of Tandem: a table says of each what it is here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

import yaml

from tandem.config.schema import keys
from tandem.config.section import Section
from tandem.migrate.table import Row

Kind = Literal["key", "reckoned", "nothing", "absent"]


@dataclass(frozen=True)
class Verdict:
    """What one setting of another system is here.

    Attributes:
        kind: key: one key; reckoned: keys whose values follow from several settings; nothing: nothing here
            depends on it; absent: there is no counterpart.
        key: the key, or the keys with commas between.
        why: the reason, or how values are converted.
        values: values that have other names here.
    """

    kind: Kind
    key: str = ""
    why: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)


REFUSED = object()
"""Stands in a verdict's values for one that is not offered."""


def read_tables(name: str) -> Any:
    """Rows by section, or the rows, of one of this package's YAML files, whose head explains them."""
    return yaml.load(
        files("tandem.migrate").joinpath(name).read_text(encoding="utf-8"),
        getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    )


def verdicts(rows: Iterable[Mapping[str, Any]]) -> dict[str, Verdict]:
    """What each setting is here, by its name."""
    return {name: _verdict(row) for row in rows for name in names_of(row)}


def names_of(row: Mapping[str, Any]) -> list[str]:
    """The settings of which a row speaks."""
    return [row["settings"]] if isinstance(row["settings"], str) else row["settings"]


_KINDS: Mapping[str, Kind] = {"reckoned": "reckoned", "nothing": "nothing", "refused": "absent"}


def _verdict(row: Mapping[str, Any]) -> Verdict:
    key = row.get("now", "")
    for field_name, kind in _KINDS.items():
        if field_name in row:
            return Verdict(kind, key, row[field_name])
    values = {**row.get("values", {}), **dict.fromkeys(row.get("except", ()), REFUSED)}
    return Verdict("key", key, row.get("why", ""), values)


@dataclass
class Peer:
    """Another system's settings, on their way to a config.

    Attributes:
        root: the config that they become.
        table: what each setting is here.
        defaults: what a setting is that nobody gives.
        given: what was given.
        config: Tandem's keys and values so far.
        rows: what became of the given settings so far.
        notes: what is not taken over of the defaults, one sentence each.
    """

    root: type[Section]
    table: Mapping[str, Verdict]
    defaults: Mapping[str, Any]
    given: Mapping[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.defaults.get(name))

    def put(self, key: str, value: Any, *, always: bool = False) -> None:
        """Sets a key whose default is another one; `always`, any."""
        known = keys(self.root)
        if key in known and (always or known[key].inherits is not None or known[key].default != value):
            self.config[key] = value

    def refuse(self, name: str, why: str) -> None:
        """Says that a setting is not taken over, in place of what was said of it before; of one that nobody
        gave, in a note."""
        if name not in self.given:
            self.notes.append(f"{name}={self[name]}, the default there, is not taken over: {why}.")
            return
        self.rows = [row for row in self.rows if row.name != name]
        self.rows.append(Row(name, self[name], "refused", why))

    def take(self, place: Callable[[str], str] = str) -> None:
        """Takes over every setting that is one key, and says of the given ones what became of them.

        Args:
            place: where a key of `tandem train` lies in this config.
        """
        for name in [*self.table, *(name for name in self.given if name not in self.table)]:
            verdict = self.table.get(name)
            if verdict is None:
                self.refuse(name, "not a setting of the version that the table is of")
            elif verdict.kind == "key":
                self._key(name, verdict, place(verdict.key))
            elif name not in self.given:
                continue
            elif verdict.kind == "nothing":
                self.rows.append(Row(name, self[name], "ignored", verdict.why))
            elif verdict.kind == "reckoned":
                self.rows.append(Row(name, self[name], "renamed", f"{place(verdict.key)}: {verdict.why}"))
            elif self[name] not in (None, False, self.defaults.get(name)):
                self.refuse(name, verdict.why)

    def _key(self, name: str, verdict: Verdict, key: str) -> None:
        value = self[name]
        try:
            new = verdict.values.get(value, value)
        except TypeError:  # a list has no other name
            new = value
        if new is None:
            if name in self.given:
                self.rows.append(Row(name, value, "ignored", "asks for nothing here"))
            return
        if new is REFUSED:
            self.refuse(name, verdict.why or "this value is not offered")
            return
        if key not in keys(self.root):
            if name in self.given:
                self.refuse(name, "there is no such setting for this trainer")
            return
        self.put(key, new, always=name in self.given)
        if name in self.given:
            self.rows.append(Row(name, value, "renamed", f"{key}={new}"))
