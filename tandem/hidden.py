"""Replace secret values in texts, so that no file and no message shows them."""

from __future__ import annotations

import json

SHORTEST = 8
"""The minimum length of a replaced value, because shorter values may occur within other words."""
_HIDDEN: dict[str, str] = {}


def hide(value: str, mark: str) -> None:
    """Register a secret value, which `masked` replaces by a mark from now on.

    Args:
        value: a text from the environment, or a value whose name marks it as a secret.
        mark: the text to show instead.
    """
    if len(value) < SHORTEST or value == mark or value in _HIDDEN:
        return
    found = {**_HIDDEN, **{form: mark for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1])}}
    _HIDDEN.clear()
    _HIDDEN.update(
        sorted(found.items(), key=lambda item: -len(item[0]))
    )  # longest first, because one may contain another


def masked(text: str) -> str:
    """Return the text with each hidden value replaced by its mark."""
    for value, mark in _HIDDEN.items():
        text = text.replace(value, mark)
    return text
