"""Values that no file and no message may show. In a text each gives way to a mark of where it came from."""

from __future__ import annotations

import json

SHORTEST = 8
"""Characters of a value that is looked for in texts. A shorter one would be found within other words."""
_HIDDEN: dict[str, str] = {}


def hide(value: str, mark: str) -> None:
    """From here on `masked` puts the mark where the value stands.

    Args:
        value: a text that came from the environment, or that is a secret by its name.
        mark: what is shown instead.
    """
    if len(value) < SHORTEST or value == mark or value in _HIDDEN:
        return
    found = {**_HIDDEN, **{form: mark for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1])}}
    _HIDDEN.clear()
    _HIDDEN.update(sorted(found.items(), key=lambda item: -len(item[0])))  # one may hold another


def masked(text: str) -> str:
    """The text with a mark in the place of each hidden value."""
    for value, mark in _HIDDEN.items():
        text = text.replace(value, mark)
    return text
