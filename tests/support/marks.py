from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values for `parametrize`. Those that are not in `quick` are marked slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
