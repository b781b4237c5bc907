"""Tables as expressions over workers' results.

An expression is evaluated over indices (what the table looks like) or over layouts (where its rows lie).
From the layout its values follow: only results that hold wanted rows of wanted columns are fetched, each
once, and every column is put together with one copy, or none where its rows follow each other in one
result. A layout is also how a share is made short: written as an expression again, it names only the
results of that share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from tandem.balance import even, partition
from tandem.errors import DataError
from tandem.protocol.ragged import row_index
from tandem.runtime.handle import Done
from tandem.runtime.index import Index
from tandem.runtime.layout import Layout, Source, Strip, compact

Table = TypeVar("Table", Index, Layout)


class Operation(Protocol):
    """A table made of others."""

    def evaluate(self, of: Evaluation[Table]) -> Table: ...

    def operands(self) -> Sequence[Node]: ...


Node = Source | Operation
"""A table as an expression."""


class Shares(Protocol):
    """A division of a table's rows."""

    @property
    def parts(self) -> int: ...

    def rows(self, indices: Evaluation[Index]) -> Sequence[np.ndarray]:
        """The rows of each share."""
        ...

    def operands(self) -> Sequence[Node]: ...


class Evaluation(Generic[Table]):
    """One evaluation of an expression, over indices or layouts; evaluates each part of it once.

    Args:
        source: a leaf's table.
        indices: the evaluation over indices that goes with one over layouts.
    """

    def __init__(self, source: Callable[[Source], Table], indices: Evaluation[Index] | None = None) -> None:
        self._source: Callable[[Source], Table] = source
        self._indices = indices
        self._tables: dict[Node, Table] = {}
        self._shares: dict[Shares, Sequence[np.ndarray]] = {}

    def __call__(self, node: Node) -> Table:
        if node not in self._tables:
            self._tables[node] = self._source(node) if isinstance(node, Source) else node.evaluate(self)
        return self._tables[node]

    def shares(self, shares: Shares) -> Sequence[np.ndarray]:
        if self._indices is not None:
            return self._indices.shares(shares)
        if shares not in self._shares:
            self._shares[shares] = shares.rows(self)  # type: ignore[arg-type]
        return self._shares[shares]


def over_indices(left: Callable[[], float | None]) -> Evaluation[Index]:
    """An evaluation over indices.

    Args:
        left: seconds left to wait.
    """
    return Evaluation(lambda source: source.index(left()))


def over_layouts(left: Callable[[], float | None]) -> Evaluation[Layout]:
    """An evaluation over layouts."""
    return Evaluation(lambda source: source.layout(left()), over_indices(left))


@dataclass(frozen=True, slots=True, eq=False)
class Concat:
    """Rows below each other. A part without any column is what a worker may return for an empty share,
    and is left out."""

    parts: tuple[Node, ...]

    def evaluate(self, of: Evaluation[Table]) -> Table:
        tables: list[Table] = [of(part) for part in self.parts]
        full = [table for table in tables if table.columns] or tables[:1]
        return full[0].concat(full)

    def operands(self) -> Sequence[Node]:
        return self.parts


@dataclass(frozen=True, slots=True, eq=False)
class Select:
    node: Node
    columns: tuple[str, ...]

    def evaluate(self, of: Evaluation[Table]) -> Table:
        return of(self.node).select(self.columns)

    def operands(self) -> Sequence[Node]:
        return (self.node,)


@dataclass(frozen=True, slots=True, eq=False)
class Union:
    """Columns side by side."""

    nodes: tuple[Node, ...]

    def evaluate(self, of: Evaluation[Table]) -> Table:
        tables: list[Table] = [of(node) for node in self.nodes]
        tables.sort(key=lambda table: not table.columns)  # the first says how many rows there are
        return tables[0].union(*tables[1:])

    def operands(self) -> Sequence[Node]:
        return self.nodes


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The named rows in their order, as `compact` writes them."""

    node: Node
    rows: slice | np.ndarray

    def evaluate(self, of: Evaluation[Table]) -> Table:
        return of(self.node)[self.rows]

    def operands(self) -> Sequence[Node]:
        return (self.node,)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Share i of n by number alone, so that a batch can be split before its size is known."""

    node: Node
    i: int
    n: int

    def evaluate(self, of: Evaluation[Table]) -> Table:
        table = of(self.node)
        return table[even(len(table), self.n)[self.i]]

    def operands(self) -> Sequence[Node]:
        return (self.node,)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Share i of a division."""

    node: Node
    shares: Shares
    i: int

    def evaluate(self, of: Evaluation[Table]) -> Table:
        table, shares = of(self.node), of.shares(self.shares)
        _check_size(len(table), sum(map(len, shares)), "a batch")
        return table[shares[self.i]]

    def operands(self) -> Sequence[Node]:
        return (self.node, *self.shares.operands())


@dataclass(frozen=True, slots=True, eq=False)
class Restore:
    """What became of the shares of a division, put together in the order before it."""

    parts: tuple[Node, ...]
    shares: Shares

    def evaluate(self, of: Evaluation[Table]) -> Table:
        shares = of.shares(self.shares)
        for i, (part, share) in enumerate(zip(self.parts, shares, strict=True)):
            _check_size(len(of(part)), len(share), f"the result of share {i}")
        return of(Concat(self.parts)).arranged(np.argsort(np.concatenate(shares)))

    def operands(self) -> Sequence[Node]:
        return (*self.parts, *self.shares.operands())


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """A division that is known.

    Attributes:
        shares: the rows of each, in integers as small as they go.
    """

    shares: tuple[np.ndarray, ...]

    @property
    def parts(self) -> int:
        return len(self.shares)

    def rows(self, indices: Evaluation[Index]) -> Sequence[np.ndarray]:
        return self.shares

    def operands(self) -> Sequence[Node]:
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """The division of rows into shares of nearly equal weight. Everyone who evaluates it comes to the
    same answer from the same index.

    Attributes:
        nodes: tables of the same samples, one of which has the column.
        column: the ragged column whose row lengths are the weights.
        parts: how many shares.
    """

    nodes: tuple[Node, ...]
    column: str
    parts: int

    def rows(self, indices: Evaluation[Index]) -> Sequence[np.ndarray]:
        return balanced([indices(node) for node in self.nodes], self.column, self.parts)

    def operands(self) -> Sequence[Node]:
        return self.nodes


def rows_of(node: Node, rows: slice | np.ndarray) -> Node:
    """Rows of an expression; of rows by number, at once."""
    if isinstance(node, Rows) and isinstance(node.rows, np.ndarray) and node.rows.dtype != bool:
        inner = rows if isinstance(rows, slice) else row_index(rows, len(node.rows)).numpy()
        return Rows(node.node, node.rows[inner])
    return Rows(node, rows)


def chunk_of(node: Node, i: int, n: int) -> Node:
    """Share i of n of an expression; of rows by number, at once."""
    if isinstance(node, Rows) and isinstance(node.rows, np.ndarray) and node.rows.dtype != bool:
        return Rows(node.node, node.rows[even(len(node.rows), n)[i]])
    return Chunk(node, i, n)


def balanced(indices: Sequence[Index], column: str, parts: int) -> list[np.ndarray]:
    """The rows of `parts` shares of nearly equal weight, ascending in each.

    Args:
        indices: of tables of the same samples.
        column: the ragged column whose row lengths are the weights.

    Raises:
        DataError: no table has the column.
    """
    weights = next((index.lengths[column] for index in indices if column in index.lengths), None)
    if weights is None:
        if any(map(len, indices)):
            raise DataError(
                "no ragged column to balance by",
                field=column,
                got=[index.columns for index in indices],
                remedy="pass a batch with this column, or register the method without balance",
            )
        return [np.empty(0, dtype=np.int32)] * parts
    return [np.array(rows, dtype=np.int32) for rows in partition(weights.tolist(), parts)]


def sources(node: Node) -> Iterator[Source]:
    """The results that an expression mentions, each once."""
    seen: set[Node] = set()
    left = [node]
    while left:
        last = left.pop()
        if last not in seen:
            seen.add(last)
            if isinstance(last, Source):
                yield last
            else:
                left += last.operands()


def written(layout: Layout, *, settle: bool = False) -> Node:
    """A layout as an expression that mentions only results that it needs.

    Args:
        settle: put together here what this process holds itself, so that only its wanted rows travel.
    """
    nodes: list[Node] = list(layout.bare)
    nodes += [_written(strip, tuple(names), settle) for strip, names in layout.strips().items()]
    return nodes[0] if len(nodes) == 1 else Union(tuple(nodes))


def _written(strip: Strip, names: tuple[str, ...], settle: bool) -> Node:
    if settle and all(isinstance(source.handle, Done) for source in strip.sources):
        taken = strip.take(names, lambda source: source.batch(None))
        return Source(Done(taken), strip.sources[0].method)
    needed = strip.needed()
    node: Node = needed.sources[0] if len(needed.sources) == 1 else Concat(needed.sources)
    rows = needed.picks
    if not isinstance(rows, range):
        node = Rows(node, compact(rows))
    elif len(rows) < sum(needed.sizes):
        node = Rows(node, slice(rows.start, rows.stop))
    known = needed.sources[0].shape
    return node if known and names == known[1] else Select(node, names)


def _check_size(got: int, expected: int, what: str) -> None:
    if got != expected:
        raise DataError(
            f"{what} has another number of rows than the division it belongs to",
            got=f"{got} rows",
            expected=f"{expected} rows",
            remedy="a method registered with balance returns one row for each row it gets",
        )
