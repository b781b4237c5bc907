"""A config as its rules see it: each section knows its dotted path, its root and which keys were changed, and
reading a key that has a wrong value ends the rule that reads it."""

from __future__ import annotations

from typing import Any, TypeVar

from tandem.config.section import Place, Section

C = TypeVar("C", bound=Section)


def view_of(config: C, changed: frozenset[str] = frozenset(), bad: frozenset[str] = frozenset()) -> C:
    """Return a copy of the config for its rules, in which wrong values are missing.

    Args:
        changed: the keys that differ from what they would be had nobody set them.
        bad: the keys whose value is a stand-in for a wrong one.
    """
    places: list[Place] = []

    def placed(section: Any, at: str) -> Any:
        copy = section.model_copy()
        copy._place = Place(at, changed)
        places.append(copy._place)
        for name, value in section:
            if isinstance(value, Section):
                vars(copy)[name] = placed(value, f"{at}{name}.")
            elif f"{at}{name}" in bad:
                del vars(copy)[name]
        return copy

    whole: C = placed(config, "")
    for place in places:
        place.root = whole
    return whole


def path(own: Section, name: str) -> str:
    """Return the dotted path of a key of the section, from the root; outside of a config, the name."""
    return name if own._place is None else own._place.at + name


def changed(own: Section, name: str) -> bool:
    """Return whether the user gave the key another value than it would have."""
    assert own._place is not None
    return path(own, name) in own._place.changed


def root(own: Section) -> Any:
    """Return the view of the whole config."""
    assert own._place is not None
    return own._place.root
