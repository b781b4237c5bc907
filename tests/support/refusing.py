"""The error that a call raises, as a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(kind: type[BaseException], call: Callable[[], Any], match: str | None = None) -> Any:
    """Return the error of this kind, whose text matches, that the call raises."""
    with pytest.raises(kind, match=match) as caught:
        call()
    return caught.value
