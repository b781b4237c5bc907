"""Tables as expressions over workers' results.

An expression is evaluated to its layout, which says where the table's rows lie. From the layout its index
and its values follow: only results that hold wanted rows of wanted columns are fetched, each once, and every
column is put together with one copy, or none where its rows follow each other in one result. A layout is also
how a share is made short: written as an expression again, it names only the results of that share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

import numpy as np

from tandem.balance import even, partition
from tandem.errors import DataError
from tandem.protocol.ragged import row_index
from tandem.runtime.handle import Done, Source
from tandem.runtime.index import Index
from tandem.runtime.layout import Layout, Strip, compact


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A table made of others by an operation of `Layout`.

    Attributes:
        name: of the method.
        tables: at least one; the method is called on the first.
        options: the method's first arguments, before the other tables.
    """

    name: Literal["select", "union", "concat", "chunk", "share", "restore", "__getitem__"]
    tables: tuple[Node, ...]
    options: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the node in fewer bytes than a dataclass takes by default."""
        return Operation, (self.name, self.tables, self.options)


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """The division of rows into shares of nearly equal weight. Everyone who evaluates it comes to the
    same answer from the same index.

    Attributes:
        tables: of the same samples; one has the column.
        column: the ragged column whose row lengths are the weights.
        parts: how many shares.
    """

    tables: tuple[Node, ...]
    column: str
    parts: int

    def __len__(self) -> int:
        return self.parts


Node = Source | Operation
"""A table as an expression."""
Division = tuple[np.ndarray, ...] | Balanced
"""A division of a table's rows: the rows of each share in integers of few bytes, or what tells them."""


def evaluation(left: Callable[[], float | None]) -> Callable[[Node], Layout]:
    """What evaluates expressions, each part of them once.

    Args:
        left: seconds left to wait for indices.
    """

    @functools.cache
    def laid_out(node: Node) -> Layout:
        if isinstance(node, Source):
            return Layout.of(node, left())
        first, *others = map(laid_out, node.tables)
        options = [divided(option) if isinstance(option, Balanced) else option for option in node.options]
        made: Layout = getattr(first, node.name)(*options, *others)
        return made

    @functools.cache
    def divided(division: Balanced) -> Sequence[np.ndarray]:
        indices = [laid_out(table).index(left) for table in division.tables]
        return balanced(indices, division.column, division.parts)

    return laid_out


def rows_of(node: Node, rows: slice | np.ndarray) -> Node:
    """Rows of an expression, as `compact` writes them; of rows by number, at once."""
    if not _by_number(node):
        return Operation("__getitem__", (node,), (rows,))
    (numbers,) = node.options
    inner = rows if isinstance(rows, slice) else row_index(rows, len(numbers)).numpy()
    return replace(node, options=(numbers[inner],))


def chunk_of(node: Node, i: int, n: int) -> Node:
    """Share i of n of an expression by number alone, so that a batch can be split before its size is known;
    of rows by number, at once."""
    if not _by_number(node):
        return Operation("chunk", (node,), (i, n))
    return rows_of(node, even(len(node.options[0]), n)[i])


def _by_number(node: Node) -> TypeGuard[Operation]:
    """Tells whether an expression names rows by number."""
    if isinstance(node, Source) or node.name != "__getitem__":
        return False
    (rows,) = node.options
    return isinstance(rows, np.ndarray) and rows.dtype != bool


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
                continue
            left += last.tables
            for option in last.options:
                left += option.tables if isinstance(option, Balanced) else ()


def written(layout: Layout, *, settle: bool = False) -> Node:
    """A layout as an expression that mentions only results that it needs.

    Args:
        settle: put together here what this process holds itself, so that only its wanted rows travel.
    """
    nodes: list[Node] = list(layout.bare)
    nodes += [_written(strip, tuple(names), settle) for strip, names in layout.strips().items()]
    return nodes[0] if len(nodes) == 1 else Operation("union", tuple(nodes))


def _written(strip: Strip, names: tuple[str, ...], settle: bool) -> Node:
    if settle and all(isinstance(source.handle, Done) for source in strip.sources):
        taken = strip.take(names, lambda source: source.batch(None))
        return Source(Done(taken), strip.sources[0].method)
    needed = strip.needed()
    node: Node = needed.sources[0] if len(needed.sources) == 1 else Operation("concat", needed.sources)
    rows = needed.picks
    if not isinstance(rows, range):
        node = rows_of(node, compact(rows))
    elif len(rows) < sum(needed.sizes):
        node = rows_of(node, slice(rows.start, rows.stop))
    known = needed.sources[0].shape
    return node if known and names == known[1] else Operation("select", (node,), (names,))
