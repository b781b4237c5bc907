"""Handles of results in Ray's object store.

The controller waits with its `Watch`, which notices failures. A worker waits for an input without a watch,
because the controller watches the process that computes the input.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayTaskError

from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged
from tandem.runtime.backend import Usage
from tandem.runtime.future import owned
from tandem.runtime.index import Index
from tandem.runtime.ray_backend.actor import INPUTS
from tandem.runtime.ray_backend.result_group import ResultGroup
from tandem.runtime.ray_backend.watch import Watch


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class RayHandle:
    """The handle of a result in Ray's object store; see `Handle`.

    Args:
        _value: The reference to the result.
        _index: The pickled index, if the result is a batch that stays with its worker.
        _watch: The controller's watch; None in other processes.
        _group: The results of all workers of the same call.
    """

    borrowed = True
    _value: ray.ObjectRef[Any]
    _index: ray.ObjectRef[bytes] | bytes | None
    _watch: Watch | None = None
    _group: ResultGroup | None = None

    def __post_init__(self) -> None:
        if self._group is not None:
            self._group.refs.append(self.first)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayHandle, (self._value, self._index)

    @property
    def first(self) -> ray.ObjectRef[Any]:
        """The smallest of the objects that exist once the method has ended."""
        return self._value if self._index is None or isinstance(self._index, bytes) else self._index

    def get(self, timeout_s: float | None = None) -> Any:
        if self._watch is None:
            return _fetch_input(self._value)
        value = self._watch.get(self._value, timeout_s, marker=self.first, group=self._group)
        if self._index is None:
            return owned(value)  # of a batch that stays with its worker, users copy only what they need
        self._watch.value_bytes += batch_bytes(value) if isinstance(value, DataProto) else 0
        return value

    def index(self, timeout_s: float | None = None) -> Index:
        if self._index is None:
            raise DataError("only a batch has an index", expected="a method that returns a DataProto")
        packed: bytes
        if isinstance(self._index, bytes):
            packed = self._index
        elif self._watch is None:
            packed = _fetch_input(self._index)
        else:
            packed = self._watch.get(self._index, timeout_s, group=self._group)
            self._watch.index_bytes += len(packed)
        index: Index = pickle.loads(packed)
        return index

    def wait(self, timeout_s: float | None = None) -> None:
        if not isinstance(self._index, bytes):
            self.index(timeout_s) if self._index is not None else self.get(timeout_s)

    def done(self) -> bool:
        if isinstance(self._index, bytes):
            return True
        ready, _ = ray.wait([self.first], timeout=0, fetch_local=False)
        return bool(ready)


def _fetch_input(value: ray.ObjectRef[Any]) -> Any:
    """Fetch an input, and record its transfer time and its number of bytes."""
    start = time.monotonic()
    ray.wait([value], fetch_local=False)
    there = time.monotonic()
    try:
        result = ray.get(value)
    except RayTaskError as error:
        raise error.cause or error from None
    size = batch_bytes(result) if isinstance(result, DataProto) else 0
    INPUTS.append(Usage(0.0, there - start, time.monotonic() - there, size))
    return result


def batch_bytes(batch: DataProto) -> int:
    """Return the number of bytes of a batch's tensors."""
    tensors = [
        t for c in batch.batch.values() for t in ((c.values, c.offsets) if isinstance(c, Ragged) else (c,))
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
