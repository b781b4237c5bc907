"""Compare columns and their elements for equality, where NaN equals NaN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tandem.protocol.ragged import Ragged, same_tensor


def same(a: Any, b: Any) -> bool:
    """Return whether two columns, elements or meta_info values are equal in type and content.

    Arrays are compared at any nesting depth, and NaN equals NaN. If the == of two objects does not return a
    single bool, the objects count as different.
    """
    if a is b:
        return True
    if isinstance(a, Ragged):
        return isinstance(b, Ragged) and a.equal(b)
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and _same_array(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, (Tensor, np.ndarray, Ragged)):
        return False
    if is_dataclass(a) and type(a) is type(b):
        return all(same(getattr(a, entry.name), getattr(b, entry.name)) for entry in fields(a))
    try:
        return bool(a == b) or bool(a != a and b != b)
    except (ValueError, TypeError, RuntimeError):  # == gave an array instead of a bool, or failed
        return False


_PLAIN = {str, bytes, int, float, bool, type(None)}  # lists of these types can be compared with ==


def _same_array(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == object:
        ours, theirs = a.ravel().tolist(), b.ravel().tolist()
        if {*map(type, ours), *map(type, theirs)} <= _PLAIN and ours == theirs:
            return True
        return all(map(same, ours, theirs))
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
