"""The results of one call of several workers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError


class Together:
    """The first results of all workers of one call, waited for and brought here at once, as that costs the
    least.

    Attributes:
        refs: of those that are waited for; empty when all are there.
    """

    __slots__ = ("_here", "_there", "refs")

    def __init__(self, refs: Sequence[ray.ObjectRef[Any]] = ()) -> None:
        self.refs = list(refs)
        self._there: list[ray.ObjectRef[Any]] = []
        self._here: dict[ray.ObjectRef[Any], Any] = {}

    def wait(self, sign: ray.ObjectRef[Any], timeout_s: float) -> bool:
        """Tells whether `sign`, one of them, exists after waiting for all."""
        if self.refs:
            count = len(self.refs)
            found, missing = ray.wait(self.refs, num_returns=count, timeout=timeout_s, fetch_local=False)
            if missing:
                return sign in found
            self._there, self.refs = self.refs, []
        return True

    def take(self, ref: ray.ObjectRef[Any], timeout_s: float) -> Any:
        """The value behind a reference, one of them or not.

        Raises:
            RayError: it is an error, or does not come in time.
        """
        if ref in self._there:
            refs, self._there = self._there, []
            with contextlib.suppress(RayTaskError):  # of one of them; the others' values are as good
                self._here = dict(zip(refs, ray.get(refs, timeout=timeout_s), strict=True))
        return self._here.pop(ref) if ref in self._here else ray.get(ref, timeout=timeout_s)
