"""JSON and YAML that somebody else wrote. Whatever they hold, reading them gives a value or an error."""

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
"""Of a whole number of 64 bits, with its sign."""


class TooLongNumber(str):
    """A number as it stands in a JSON text."""


class TooLargeError(yaml.YAMLError):  # type: ignore[misc] # its base has no types
    """A YAML text that is nested too deep, or whose aliases stand for too much."""


def parse_json(text: str | bytes | bytearray, **kinds: Any) -> Any:
    """Return the value of a JSON text.

    Args:
        kinds: what makes numbers, as of `json.loads`.

    Raises:
        ValueError: it is not JSON, or nested too deep.
    """
    try:
        return json.loads(text, **kinds)
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_exact(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text, with a `TooLongNumber` for each number that 64 bits would change.

    Raises:
        ValueError: it is not JSON, or nested too deep.
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
    except ArithmeticError:  # an exponent beyond all
        exact = False
    return number if exact else TooLongNumber(text)


def parse_yaml(text: str | bytes) -> Any:
    """Return the value of a YAML text, of plain types.

    Raises:
        yaml.YAMLError: see `check_yaml`.
        ValueError: a value is none of its type, such as a date without a day.
    """
    check_yaml(text)
    return yaml.load(text, _LOADER)


def check_yaml(text: str | bytes) -> None:
    """Check that a YAML text can be read. The loaders build what is nested by recursion, the one in C until
    the process dies, and a few aliases of aliases stand for more values than there is memory.

    Raises:
        yaml.YAMLError: it is not YAML.
        TooLargeError: it is nested deeper than 100, stands for more than a million values, or holds itself.
    """
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    size = 0  # of what is open at this place
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
                raise TooLargeError(f"*{event.anchor} stands within itself")
            size += sizes.get(event.anchor, 1)
        else:
            size += isinstance(event, yaml.ScalarEvent)
        if len(opened) > _DEEPEST:
            raise TooLargeError(f"nested deeper than {_DEEPEST}")
        if size > _MOST:
            raise TooLargeError(f"stands for more than {_MOST:,} values")
