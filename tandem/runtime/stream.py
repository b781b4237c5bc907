"""The result of a streaming method: a batch whose samples become available one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tandem.errors import DataError
from tandem.protocol import DataProto
from tandem.runtime.backend import StreamPart
from tandem.runtime.dispatch import Mesh
from tandem.runtime.future import BatchFuture


class BatchStream:
    """The parts of a streaming method's result.

    Iteration yields each part as soon as it exists. A second iteration yields the earlier parts again.

    Args:
        parts: The parts of all workers, in the order in which they become available.
        method: The name of the called method, for messages.
        mesh: The mesh, which determines the workers whose parts are used, and their order.
    """

    def __init__(self, parts: Iterator[StreamPart], method: str, mesh: Mesh) -> None:
        self._incoming = parts
        self._method = method
        self._order = {rank: place for place, rank in enumerate(mesh.collectors)}
        self._parts: list[tuple[StreamPart, BatchFuture]] = []
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[BatchFuture]:
        position = 0
        while position < len(self._parts) or self._receive():
            yield self._parts[position][1]
            position += 1

    def map(self, fn: Callable[[BatchFuture], BatchFuture]) -> BatchFuture:
        """Apply `fn` to each part as soon as it exists.

        Args:
            fn: A function from a part to a batch with the same number of rows.

        Returns:
            The concatenated results in the order of the method's rows: by rank, then by row.

        Raises:
            DataError: The row numbers from a worker are not exactly 0 … B-1.
        """
        results = [fn(part) for part in self]
        if not results:
            return BatchFuture.of(DataProto())
        ranks = [self._order[part.rank] for part, _ in self._parts]
        places = [np.asarray(part.rows, dtype=np.int64) for part, _ in self._parts]
        before = 0
        for rank in sorted(set(ranks)):
            positions = [position for position, each in enumerate(ranks) if each == rank]
            named = np.concatenate([places[position] for position in positions])
            if not np.array_equal(np.sort(named), np.arange(len(named))):
                raise DataError(
                    f"the parts of {self._method} do not form a whole batch",
                    field=f"data-parallel rank {rank}",
                    got=f"{len(named)} rows: {named.tolist()[:8]}…",
                    expected="each of 0 … B-1 once",
                )
            for position in positions:
                places[position] = places[position] + before
            before += len(named)
        return BatchFuture.arranged(results, places)

    def all(self) -> BatchFuture:
        """Return the whole batch after all workers have ended."""
        return self.map(lambda part: part)

    def _receive(self) -> bool:
        """Wait for one more part; return False if there are no more parts."""
        if self._failure is not None:
            raise self._failure  # after an error, an iterator only reports that it has ended
        try:
            for part in self._incoming:
                if part.rank in self._order:
                    self._parts.append((part, BatchFuture.collected([part.handle], self._method)))
                    return True
        except Exception as failure:
            self._failure = failure
            raise
        return False
