"""Safe parsers for JSON and YAML from untrusted sources."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEEPEST = 100
_MOST = 1_000_000
_DIGITS = 20
"""The maximum number of characters of a 64-bit integer, including its sign."""


class TooLongNumber(str):
    """A number that 64 bits cannot represent, as written in a JSON text."""


class TooLargeError(yaml.YAMLError):  # type: ignore[misc] # its base class has no type annotations
    """Raised if a YAML text is nested too deeply, or if its aliases expand to too many values."""


def parse_json(text: str | bytes | bytearray, **kinds: Any) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the text.
        kinds: functions that convert numbers, as in `json.loads`.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, **kinds)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_exact(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text, with a `TooLongNumber` for each number that 64 bits would change.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    return parse_json(text, parse_int=_whole, parse_float=_with_point)


def _whole(text: str) -> int | TooLongNumber:
    if len(text) > _DIGITS or not -(2**63) <= int(text) < 2**63:
        return TooLongNumber(text)
    return int(text)


def _with_point(text: str) -> float | TooLongNumber:
    number = float(text)
    try:
        exact = math.isfinite(number) and Decimal(repr(number)) == Decimal(text)
    except ArithmeticError:  # the exponent is too large
        exact = False
    return number if exact else TooLongNumber(text)


def parse_yaml(text: str | bytes) -> Any:
    """Parse a YAML text that contains only plain types, and return its value.

    Raises:
        yaml.YAMLError: the text is not YAML, or is too large (see `check_yaml`).
        ValueError: a value is not valid for its type, such as a date without a day.
    """
    check_yaml(text)
    return yaml.load(text, _LOADER)


def check_yaml(text: str | bytes) -> None:
    """Check that a YAML text can be read safely.

    The loaders build nested values by recursion; in the C loader, nesting that is too deep crashes the
    process. A few aliases of aliases can also expand to more values than fit in memory.

    Raises:
        yaml.YAMLError: the text is not YAML.
        TooLargeError: the text is nested deeper than 100 levels, expands to more than a million values, or
            contains itself.
    """
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    size = 0  # number of values in the collection that is open here
    for event in yaml.parse(text, _LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, size))
            size = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes[anchor or ""] = size
            size += before
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in opened):
                raise TooLargeError(f"*{event.anchor} contains itself")
            size += sizes.get(event.anchor, 1)
        else:
            size += isinstance(event, yaml.ScalarEvent)
        if len(opened) > _DEEPEST:
            raise TooLargeError(f"nested deeper than {_DEEPEST}")
        if size > _MOST:
            raise TooLargeError(f"stands for more than {_MOST:,} values")
