"""Make a copy of a config for the rules that check the config.

In the copy, each section knows its dotted path, the root of the config, and which keys were changed. When a
rule reads a key that has an invalid value, the rule stops.
"""

from __future__ import annotations

from typing import Any, TypeVar

from tandem.config.section import Place, Section

C = TypeVar("C", bound=Section)


def view_of(config: C, changed: frozenset[str] = frozenset(), bad: frozenset[str] = frozenset()) -> C:
    """Return a copy of the config for rules. In the copy, reading an invalid value raises an error.

    Args:
        config: the config.
        changed: the keys whose values differ from the default or inherited value.
        bad: the keys whose invalid values were replaced by defaults.
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
    """Return the dotted path of a key of the section, from the root; outside of a config, the name itself."""
    return name if own._place is None else own._place.at + name


def changed(own: Section, name: str) -> bool:
    """Return whether the user gave the key a value that differs from its default or inherited value."""
    assert own._place is not None
    return path(own, name) in own._place.changed


def root(own: Section) -> Any:
    """Return the copy of the whole config."""
    assert own._place is not None
    return own._place.root
