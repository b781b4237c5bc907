"""Tables as expressions over workers' results.

Evaluating an expression gives a layout, which stores for each row the result that contains the row. The index
and the values of the table are computed from the layout. Only results with requested rows of requested
columns are fetched, and each result is fetched once. Every column is assembled with one copy, or without a
copy if its rows are consecutive in one result. Converting a layout back to an expression also makes the
expression of a few rows short: it contains only the results with these rows.
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
    """An expression node: an operation of `Layout` on other tables.

    Attributes:
        name: The name of the method.
        tables: At least one table. The method is called on the first table.
        options: The first arguments of the method, before the other tables.
    """

    name: Literal["select", "union", "concat", "chunk", "share", "restore", "__getitem__"]
    tables: tuple[Node, ...]
    options: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the node in fewer bytes than a dataclass by default."""
        return Operation, (self.name, self.tables, self.options)


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """An expression for the division of rows into groups of nearly equal weight, one per rank.

    The division depends only on the index, so every process that evaluates it gets the same result.

    Attributes:
        tables: Tables of the same samples. One of these tables has the column.
        column: The ragged column whose row lengths are the weights.
        parts: The number of groups.
    """

    tables: tuple[Node, ...]
    column: str
    parts: int

    def __len__(self) -> int:
        return self.parts


Node = Source | Operation
"""A table as an expression."""
Division = tuple[np.ndarray, ...] | Balanced
"""A division of a table's rows: the row numbers of each group (compact integers), or a `Balanced` rule."""


def evaluation(left: Callable[[], float | None]) -> Callable[[Node], Layout]:
    """Return a function that evaluates expressions, and evaluates each subexpression only once.

    Args:
        left: A function that returns the remaining time to wait for indices, in seconds.
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
    """Return an expression for some rows of a table; `rows` is a result of `compact`.

    If the expression already has explicit row numbers, the rows are selected from these numbers at once.
    """
    if not _by_number(node):
        return Operation("__getitem__", (node,), (rows,))
    (numbers,) = node.options
    inner = rows if isinstance(rows, slice) else row_index(rows, len(numbers)).numpy()
    return replace(node, options=(numbers[inner],))


def chunk_of(node: Node, i: int, n: int) -> Node:
    """Return an expression for chunk i of n nearly equal chunks of a table's rows.

    A batch can be chunked in this way before its size is known. If the expression already has explicit row
    numbers, the chunk is selected from these numbers at once.
    """
    if not _by_number(node):
        return Operation("chunk", (node,), (i, n))
    return rows_of(node, even(len(node.options[0]), n)[i])


def _by_number(node: Node) -> TypeGuard[Operation]:
    """Return whether an expression selects rows by explicit row numbers."""
    if isinstance(node, Source) or node.name != "__getitem__":
        return False
    (rows,) = node.options
    return isinstance(rows, np.ndarray) and rows.dtype != bool


def balanced(indices: Sequence[Index], column: str, parts: int) -> list[np.ndarray]:
    """Return the rows of `parts` groups of nearly equal weight, in ascending order within each group.

    Args:
        indices: Indices of tables of the same samples.
        column: The ragged column whose row lengths are the weights.
        parts: The number of shares.

    Raises:
        DataError: No table has the column.
    """
    weights = next((index.lengths[column] for index in indices if column in index.lengths), None)
    if weights is None:
        if any(map(len, indices)):
            raise DataError(
                "no batch has the ragged column to balance by",
                field=column,
                got=[index.columns for index in indices],
                remedy="pass a batch with this column, or register the method without balance",
            )
        return [np.empty(0, dtype=np.int32)] * parts
    return [np.array(rows, dtype=np.int32) for rows in partition(weights.tolist(), parts)]


def sources(node: Node) -> Iterator[Source]:
    """Yield each result in an expression, without duplicates."""
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


def as_expression(layout: Layout, *, settle: bool = False) -> Node:
    """Convert a layout to an expression with only the results that the layout needs.

    Args:
        layout: The layout.
        settle: Whether to assemble results that are in this process, so that only their requested rows are
            sent.
    """
    nodes: list[Node] = list(layout.bare)
    nodes += [_strip_expression(strip, tuple(names), settle) for strip, names in layout.strips().items()]
    return nodes[0] if len(nodes) == 1 else Operation("union", tuple(nodes))


def _strip_expression(strip: Strip, names: tuple[str, ...], settle: bool) -> Node:
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
