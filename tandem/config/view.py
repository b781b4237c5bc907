"""A config as its rules see it: each section knows its dotted path, its root and which keys were changed, and
reading a key that has a wrong value ends the rule that reads it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from tandem.config.section import Section

C = TypeVar("C", bound=Section)


class WrongValueRead(Exception):
    """A rule has read a key whose value is a stand-in for a wrong one, and knows nothing from there on."""


@dataclass(frozen=True)
class _Run:
    root: Section
    changed: frozenset[str]
    bad: frozenset[str]


class View:
    """Stands for a section: has its keys, properties and methods, and passes for an instance of its class."""

    def __init__(self, section: Section, at: str, run: _Run) -> None:
        self._section, self._at, self._run = section, at, run

    @property  # type: ignore[misc]  # `isinstance`, and `super()` within the section's methods, ask for it
    def __class__(self) -> Any:
        return type(self._section)

    def __getattr__(self, name: str) -> Any:
        section = self._section
        if name not in type(section).model_fields:
            member: Any = inspect.getattr_static(type(section), name)
            return member.__get__(self, type(section)) if hasattr(member, "__get__") else member
        path, value = self._at + name, getattr(section, name)
        if isinstance(value, Section):
            return View(value, f"{path}.", self._run)
        if path in self._run.bad:
            raise WrongValueRead(path)
        return value


def view_of(config: C, changed: frozenset[str] = frozenset(), bad: frozenset[str] = frozenset()) -> C:
    """The root's view.

    Args:
        changed: the keys that differ from what they would be had nobody set them.
        bad: the keys whose value is a stand-in for a wrong one.
    """
    return cast(C, View(config, "", _Run(config, changed, bad)))


def path(own: Section, name: str) -> str:
    """The dotted path of a key of the section, from the root; of a section outside of a config, the name."""
    view = cast(Any, own)
    return str(view._at + name) if type(view) is View else name


def changed(own: Section, name: str) -> bool:
    """Whether the user gave the key another value than it would have."""
    view = cast(Any, own)
    return view._at + name in view._run.changed


def root(own: Section) -> Any:
    """The view of the whole config."""
    run = cast(Any, own)._run
    return View(run.root, "", run)
