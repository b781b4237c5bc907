"""Read files of `torch.save` safely, without running code from the file.

Files may contain tensors, numpy arrays and plain values. A file that names any other class or function is
refused before the class or function is called.
"""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from tandem.errors import TandemError

_KINDS = re.compile(r"[biufcSUO]\d+")
"""The accepted dtypes of numpy arrays: numbers, texts, objects."""
_MODULES = "numpy.core.multiarray", "numpy._core.multiarray"


class _Type:
    """A stand-in for a numpy type while a file is read.

    The real numpy type would accept any flags and fields from the file.
    """

    def __init__(self, name: str, *_: Any) -> None:
        self._name, self._order = name, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = state[1] if state[1] in ("<", ">") else "="

    def real(self) -> np.dtype[Any]:
        if not _KINDS.fullmatch(self._name):
            raise ValueError(f"a numpy array of type {self._name!r}")
        return np.dtype(self._name).newbyteorder(self._order)  # type: ignore[arg-type]


class _Array:
    """A stand-in for a numpy array while a file is read."""

    def __init__(self, *_: Any) -> None:
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def real(self, read: dict[int, tuple[Any, Any]]) -> np.ndarray:
        _, shape, kind, by_columns, data = self._state
        dtype = kind.real()
        if dtype.kind != "O":
            return np.ndarray(shape, dtype, data, order="F" if by_columns else "C").copy("K")
        flat = np.empty(len(data), dtype=object)
        for at, value in enumerate(data):
            flat[at] = _real(value, read)
        return flat.reshape(shape)  # numpy always writes objects row by row


def _number(kind: _Type, data: bytes) -> Any:
    """Return a numpy scalar."""
    dtype = kind.real()
    if dtype.kind == "O":
        raise ValueError("a numpy scalar that is an object")
    return np.frombuffer(data, dtype)[0]


_KNOWN: list[Any] = [
    *(bytes, Decimal, date, datetime, time, timedelta, timezone),
    (_Type, "numpy.dtype"),
    (_Array, "numpy.ndarray"),
    *((_Array, f"{module}._reconstruct") for module in _MODULES),
    *((_number, f"{module}.scalar") for module in _MODULES),
]


def load_plain(
    source: Path | IO[bytes], *, refused: type[TandemError], field: str, remedy: str | None = None
) -> Any:
    """Read a file of `torch.save`, with all tensors on the CPU.

    Args:
        source: the file.
        refused: class of the error if the file contains objects other than tensors, arrays and plain values.
        field: the field of the error.
        remedy: the remedy of the error.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    try:
        with torch.serialization.safe_globals(_KNOWN):
            found = torch.load(source, map_location="cpu", weights_only=True)
        return _real(found, {})
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged file can make the reader raise any error
        raise refused(
            "this file holds something other than tensors, arrays and plain values, and was not read",
            field=field,
            got=why(error),
            expected="a file that this program wrote; code in such a file is never run",
            remedy=remedy,
        ) from error


def why(error: BaseException) -> str:
    """Return why PyTorch's restricted reader refused a file, without its advice to disable the checks."""
    text = str(error)
    for pattern in (r"GLOBAL (\S+)", r"WeightsUnpickler error: ([^\n]+)"):
        found = re.search(pattern, text)
        if found is not None:
            return found[1]
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"


def _real(value: Any, read: dict[int, tuple[Any, Any]]) -> Any:
    """Return the value, with numpy arrays in place of their stand-ins.

    Args:
        value: the value.
        read: a dict from the id of each visited value to (value, replacement). The reference to the value
            keeps it alive.
    """
    if id(value) in read:
        return read[id(value)][1]
    real = value
    if isinstance(value, _Array):
        real = value.real(read)
    elif isinstance(value, _Type):
        real = value.real()
    elif type(value) is tuple:
        real = tuple(_real(each, read) for each in value)
    read[id(value)] = value, real
    if isinstance(value, dict):
        value.update({name: _real(each, read) for name, each in value.items()})
    elif isinstance(value, list):
        value[:] = [_real(each, read) for each in value]
    return real
