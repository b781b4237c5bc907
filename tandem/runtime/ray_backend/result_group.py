"""The results of one call on several workers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError


class ResultGroup:
    """The results of all workers of one call, which are awaited and fetched together.

    Fetching all results together is faster than fetching them one by one.

    Attributes:
        refs: The references whose results do not exist yet; empty once all results exist.
    """

    __slots__ = ("_existing", "_values", "refs")

    def __init__(self, refs: Sequence[ray.ObjectRef[Any]] = ()) -> None:
        self.refs = list(refs)
        self._existing: list[ray.ObjectRef[Any]] = []
        self._values: dict[ray.ObjectRef[Any], Any] = {}

    def wait(self, marker: ray.ObjectRef[Any], timeout_s: float) -> bool:
        """Wait for all results, and return whether `marker`, one of them, exists."""
        if self.refs:
            count = len(self.refs)
            found, missing = ray.wait(self.refs, num_returns=count, timeout=timeout_s, fetch_local=False)
            if missing:
                return marker in found
            self._existing, self.refs = self.refs, []
        return True

    def take(self, ref: ray.ObjectRef[Any], timeout_s: float) -> Any:
        """Return the value of a reference, of this group or of another call.

        Raises:
            RayError: The value is an error, or it does not arrive in time.
        """
        if ref in self._existing:
            refs, self._existing = self._existing, []
            with contextlib.suppress(RayTaskError):  # one of them failed; the values of the others are valid
                self._values = dict(zip(refs, ray.get(refs, timeout=timeout_s), strict=True))
        return self._values.pop(ref) if ref in self._values else ray.get(ref, timeout=timeout_s)
