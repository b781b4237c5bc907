"""Dispatch: split a call on a worker group into calls on its workers, and combine the workers' results.

Dispatch functions take a mesh and the arguments, and return one call per rank. Collect functions take a mesh
and one result per rank. Batches are not padded: ranks may get different numbers of rows, and no rows at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from tandem.balance import even
from tandem.errors import ConfigError, DataError
from tandem.protocol import DataProto
from tandem.runtime.expression import Division
from tandem.runtime.future import BatchFuture, division

Call = tuple[tuple[Any, ...], dict[str, Any]]
DispatchFn = Callable[["Mesh", tuple[Any, ...], dict[str, Any]], Sequence[Call | None]]
"""A function from (mesh, args, kwargs) to one (args, kwargs) per rank.

A rank that is not called gets None.
"""
CollectFn = Callable[["Mesh", list[Any]], Any]
"""A function from (mesh, one result per rank) to the result of the call.

The result of a rank that was not called is None.
"""


class Dispatch(Enum):
    """The dispatch modes: how a method of a group is called on the workers.

    ONE_TO_ALL: Call all workers with the same arguments; return a list of results, in order of rank.
    ALL_TO_ALL: Each argument is a list with one item per rank; return a list of results, in order of rank.
    RANK_ZERO: Call only rank 0; return its result.
    DP_COMPUTE_PROTO: Split the rows of every DataProto or BatchFuture argument over the workers, and pass all
    other arguments unchanged. Return the concatenated rows of the results.
    ND_COMPUTE_PROTO: Like DP_COMPUTE_PROTO, over a mesh that the workers registered. All workers of a
    data-parallel rank get the same rows, and only the workers that collect return rows to the group.
    DP_COMPUTE: Like DP_COMPUTE_PROTO, but for plain lists.
    """

    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    RANK_ZERO = "rank_zero"
    DP_COMPUTE_PROTO = "dp_compute_proto"
    ND_COMPUTE_PROTO = "nd_compute_proto"
    MEGATRON_COMPUTE = "nd_compute_proto"
    MEGATRON_COMPUTE_PROTO = "nd_compute_proto"
    DP_COMPUTE = "dp_compute"


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """A worker's data-parallel rank in a mesh of workers.

    Attributes:
        dp_rank: The data-parallel rank, 0 … dp_size-1. Batches are split into dp_size parts, and the worker
            gets part dp_rank.
        dp_size: The number of data-parallel ranks.
        collects: Whether the group uses the worker's results. This is true for one worker per dp_rank.
    """

    dp_rank: int
    dp_size: int
    collects: bool = True


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh: the data-parallel ranks of all workers of a group.

    Args:
        places: The `MeshPlace` of each rank.
        name: The name of the mesh, for messages.

    Raises:
        ConfigError: The places are inconsistent.
    """

    places: tuple[MeshPlace, ...]
    name: str = "dp"

    def __post_init__(self) -> None:
        sizes = {place.dp_size for place in self.places}
        if len(sizes) != 1:
            self._fail("the workers have different data-parallel sizes", sorted(sizes), "one size")
        ranks = list(range(self.dp_size))
        if sorted({place.dp_rank for place in self.places}) != ranks:
            self._fail(
                "data-parallel ranks are missing or out of range", [p.dp_rank for p in self.places], ranks
            )
        collecting = sorted(place.dp_rank for place in self.places if place.collects)
        if collecting != ranks:
            self._fail("exactly one worker of each data-parallel rank must collect", collecting, ranks)

    def _fail(self, message: str, got: Any, expected: Any) -> None:
        raise ConfigError(
            message,
            field=f"mesh '{self.name}'",
            got=got,
            expected=expected,
            remedy="check the register_mesh calls of the workers",
        )

    @classmethod
    def flat(cls, world_size: int) -> Mesh:
        """Return a mesh in which every worker has a different data-parallel rank."""
        return cls(tuple(MeshPlace(rank, world_size) for rank in range(world_size)))

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def dp_size(self) -> int:
        return self.places[0].dp_size

    @property
    def collectors(self) -> list[int]:
        """The ranks that collect, in the order of their data-parallel ranks."""
        ranks = [rank for rank, place in enumerate(self.places) if place.collects]
        return sorted(ranks, key=lambda rank: self.places[rank].dp_rank)


@dataclass(frozen=True, slots=True)
class Registration:
    """The options of a method that was registered with @register.

    Attributes:
        dispatch_mode: A member of Dispatch, or a (dispatch, collect) pair of functions.
        blocking: Whether a call returns the result instead of a future.
        collect: "all" combines the results as `dispatch_mode` defines. "first" uses the result of the first
            worker that collects; choose it if all workers return equal results.
        mesh: The name of the mesh for ND_COMPUTE_PROTO; None: the only mesh that the workers registered.
        balance: The ragged column whose total row lengths are balanced over ranks; None: ranks get equal
            numbers of rows.
        stream: Whether the method is a generator of `Part`.

    Raises:
        ConfigError: `dispatch_mode` is not a mode, or options cannot be combined.
    """

    dispatch_mode: Dispatch | tuple[DispatchFn, CollectFn] = Dispatch.DP_COMPUTE_PROTO
    blocking: bool = True
    collect: Literal["all", "first"] = "all"
    mesh: str | None = None
    balance: str | None = None
    stream: bool = False

    def __post_init__(self) -> None:
        pair = isinstance(self.dispatch_mode, tuple) and len(self.dispatch_mode) == 2
        if not pair and not isinstance(self.dispatch_mode, Dispatch):
            raise ConfigError(
                "not a dispatch mode",
                field="register(dispatch_mode=…)",
                got=self.dispatch_mode,
                expected="a member of Dispatch or a (dispatch, collect) pair; @register needs parentheses",
            )
        if self.balance and not self.divides_batches:
            self._refuse("balance", "dispatch_mode DP_COMPUTE_PROTO or ND_COMPUTE_PROTO")
        if self.balance and self.stream:
            self._refuse("balance", "stream=False; a stream does not return one row per given row")
        if self.stream and not self.makes_batch:
            self._refuse("stream", 'dispatch_mode DP_COMPUTE_PROTO or ND_COMPUTE_PROTO, collect="all"')

    def _refuse(self, option: str, expected: str) -> None:
        raise ConfigError(
            "these options of a method do not go together",
            field=f"register({option}=…)",
            got=f"dispatch_mode={self.dispatch_mode}, collect={self.collect!r}, stream={self.stream}",
            expected=expected,
        )

    @property
    def over_mesh(self) -> bool:
        return self.dispatch_mode is Dispatch.ND_COMPUTE_PROTO or self.mesh is not None

    @property
    def divides_batches(self) -> bool:
        """Whether the rows of every batch are split over the data-parallel ranks."""
        return self.dispatch_mode in (Dispatch.DP_COMPUTE_PROTO, Dispatch.ND_COMPUTE_PROTO)

    @property
    def makes_batch(self) -> bool:
        """Whether the result is a batch, concatenated from the batches of the workers that collect."""
        return self.divides_batches and self.collect == "all"

    def functions(self) -> tuple[DispatchFn, CollectFn]:
        if isinstance(self.dispatch_mode, Dispatch):
            dispatch, collect = _FUNCTIONS[self.dispatch_mode]
        else:
            dispatch, collect = self.dispatch_mode
        return dispatch, collect_first if self.collect == "first" else collect


_BATCHES = DataProto, BatchFuture


def dispatch_one_to_all(mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    return [(args, kwargs)] * mesh.world_size


def dispatch_rank_zero(mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    return [(args, kwargs), *[None] * (mesh.world_size - 1)]


def dispatch_all_to_all(mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    """Return the calls that pass item r of every argument to rank r.

    Raises:
        DataError: An argument is not a list with one item per rank.
    """
    for argument in (*args, *kwargs.values()):
        if not isinstance(argument, (list, tuple)) or len(argument) != mesh.world_size:
            raise DataError(
                "an ALL_TO_ALL argument is not a list with one item per worker",
                got=f"{type(argument).__name__}"
                + (f" of {len(argument)}" if hasattr(argument, "__len__") else ""),
                expected=f"a list of {mesh.world_size}",
            )
    return [
        (tuple(a[rank] for a in args), {name: a[rank] for name, a in kwargs.items()})
        for rank in range(mesh.world_size)
    ]


def dispatch_batches(mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    """Return the calls that pass contiguous rows of every batch to each data-parallel rank.

    The numbers of rows differ by at most one.

    Raises:
        DataError: The batches have different sizes. Sizes that are not yet known are not checked.
    """
    _batches(args, kwargs)
    return _by_share(mesh, _BATCHES, lambda batch: batch.chunk(mesh.dp_size), args, kwargs)


def divide_batches(
    mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any], column: str
) -> tuple[list[Call | None], Division | None]:
    """Return the calls that split every batch's rows over data-parallel ranks with nearly equal weights.

    This function does not wait for results.

    Args:
        mesh: The mesh of the group.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        column: The ragged column of one of the batches whose row lengths are the weights.

    Returns:
        The calls, and the division of the rows (the rows of each rank), which is None if there is only one
        data-parallel rank.

    Raises:
        DataError: The batches have different sizes, or no batch has the column. Batches that are not yet
            known are not checked.
    """
    batches = _batches(args, kwargs)
    if mesh.dp_size == 1 or not batches:
        return dispatch_batches(mesh, args, kwargs), None
    futures = [BatchFuture.of(batch) if isinstance(batch, DataProto) else batch for batch in batches]
    division_of_rows = division(futures, mesh.dp_size, column)

    def divided(batch: DataProto | BatchFuture) -> Sequence[Any]:
        if isinstance(batch, BatchFuture):
            return batch.divided(division_of_rows)
        if isinstance(division_of_rows, tuple):
            return [batch[rows] for rows in division_of_rows]
        return BatchFuture.of(batch).divided(division_of_rows)

    return _by_share(mesh, _BATCHES, divided, args, kwargs), division_of_rows


def _batches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DataProto | BatchFuture]:
    """Return the batches among the arguments.

    Raises:
        DataError: The known sizes of the batches differ.
    """
    batches = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, _BATCHES)]
    if len(batches) == 1:
        return batches
    known = [batch for batch in batches if isinstance(batch, DataProto) or batch.ready()]
    if len({len(batch) for batch in known}) > 1:
        columns = [batch.columns if isinstance(batch, DataProto) else batch.index.columns for batch in known]
        raise DataError(
            "the batches of one call have different sizes",
            got=[f"{len(b)} rows: {', '.join(names)}" for b, names in zip(known, columns, strict=True)],
            expected="the same samples in each",
        )
    return batches


def dispatch_lists(mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call | None]:
    """Return the calls that split every list over data-parallel ranks; other arguments go to all ranks."""

    def spans(items: list[Any]) -> Sequence[Any]:
        return [items[span] for span in even(len(items), mesh.dp_size)]

    return _by_share(mesh, list, spans, args, kwargs)


def _by_share(
    mesh: Mesh,
    kind: type | tuple[type, ...],
    cut: Callable[[Any], Sequence[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Call | None]:
    """Split every argument of type `kind` with `cut`, one part per rank; other arguments go to all ranks."""

    def shares(argument: Any) -> Sequence[Any]:
        return cut(argument) if isinstance(argument, kind) else [argument] * mesh.dp_size

    positional = [shares(argument) for argument in args]
    named = {name: shares(argument) for name, argument in kwargs.items()}
    return [
        (
            tuple(parts[place.dp_rank] for parts in positional),
            {name: parts[place.dp_rank] for name, parts in named.items()},
        )
        for place in mesh.places
    ]


def collect_all(mesh: Mesh, results: list[Any]) -> list[Any]:
    return results


def collect_rank_zero(mesh: Mesh, results: list[Any]) -> Any:
    return results[0]


def collect_first(mesh: Mesh, results: list[Any]) -> Any:
    return results[mesh.collectors[0]]


def collect_batches(mesh: Mesh, results: list[Any]) -> DataProto:
    """Concatenate the batches of the workers that collect.

    A worker without rows may return a batch without columns. Such a batch is left out if other batches have
    columns.

    Raises:
        DataError: The batches have different columns, or different values for the same key of meta_info.
    """
    parts: list[DataProto] = [results[rank] for rank in mesh.collectors]
    return DataProto.concat([part for part in parts if part.columns] or parts)


def collect_lists(mesh: Mesh, results: list[Any]) -> list[Any]:
    """Concatenate the lists of the workers that collect.

    Raises:
        DataError: A result is not a list.
    """
    out: list[Any] = []
    for rank in mesh.collectors:
        if not isinstance(results[rank], list):
            raise DataError(
                f"rank {rank} did not return a list", got=type(results[rank]).__name__, expected="list"
            )
        out += results[rank]
    return out


_FUNCTIONS: dict[Dispatch, tuple[DispatchFn, CollectFn]] = {
    Dispatch.ONE_TO_ALL: (dispatch_one_to_all, collect_all),
    Dispatch.ALL_TO_ALL: (dispatch_all_to_all, collect_all),
    Dispatch.RANK_ZERO: (dispatch_rank_zero, collect_rank_zero),
    Dispatch.DP_COMPUTE_PROTO: (dispatch_batches, collect_batches),
    Dispatch.ND_COMPUTE_PROTO: (dispatch_batches, collect_batches),
    Dispatch.DP_COMPUTE: (dispatch_lists, collect_lists),
}
