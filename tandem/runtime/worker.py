"""Worker, the base of everything that runs on a device; `register`, which offers its methods to a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, TypeVar

from tandem.runtime.dispatch import CollectFn, Dispatch, DispatchFn, MeshPlace, Registration
from tandem.runtime.future import resolve

Method = TypeVar("Method", bound=Callable[..., Any])
AnyWorker = TypeVar("AnyWorker", bound="Worker")
_MARK = "__tandem_registration__"


class Worker:
    """One process' part of a group; subclasses hold an engine and register methods.

    Attributes:
        rank: 0 … world_size-1; set before `__init__` of the subclass runs.
        world_size: workers in the group.
    """

    rank: int = 0
    world_size: int = 1
    _meshes: dict[str, MeshPlace]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker._meshes = {}
        return worker

    def register_mesh(self, name: str, dp_rank: int, dp_size: int, collects: bool = True) -> None:
        """States this worker's place in the mesh `name`, for methods with ND_COMPUTE_PROTO.

        Args:
            dp_rank: which share of a batch it gets, 0 … dp_size-1; the same for the tensor, sequence
                and pipeline ranks that work on one share.
            collects: whether its results are taken; exactly one worker per dp_rank, such as tensor
                rank 0 of the last pipeline stage.
        """
        self._meshes[name] = MeshPlace(dp_rank, dp_size, collects)

    def meshes(self) -> dict[str, MeshPlace]:
        """This worker's places by mesh name."""
        return dict(self._meshes)


BaseWorker = Worker


def register(
    dispatch_mode: Dispatch | tuple[DispatchFn, CollectFn] = Dispatch.DP_COMPUTE_PROTO,
    blocking: bool = True,
    *,
    collect: Literal["all", "first"] = "all",
    mesh: str | None = None,
) -> Callable[[Method], Method]:
    """Makes a method of a Worker callable on a WorkerGroup; the method itself is unchanged.

    Args:
        dispatch_mode: a member of Dispatch, or a pair of functions (dispatch, collect).
        blocking: False returns a future at once: a BatchFuture where batches are concatenated, else a Future.
        collect: "all" as the mode says; "first" the result of the first worker that collects, for
            results that are the same on every worker, such as metrics already reduced over ranks.
        mesh: the mesh that ND_COMPUTE_PROTO goes over; not needed when the workers registered only one.
    """

    def mark(method: Method) -> Method:
        setattr(method, _MARK, Registration(dispatch_mode, blocking, collect, mesh))
        return method

    return mark


def registrations(worker_class: type[Worker]) -> dict[str, Registration]:
    """All registered methods by name. A method that overrides a registered one need not repeat it."""
    found: dict[str, Registration] = {}
    for base in reversed(worker_class.__mro__):
        for name, member in vars(base).items():
            if hasattr(member, _MARK):
                found[name] = getattr(member, _MARK)
    return found


def create(
    worker_class: type[AnyWorker],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> AnyWorker:
    """The worker of one rank; for backends."""
    worker = worker_class.__new__(worker_class, *args, **kwargs)
    worker.rank, worker.world_size = rank, world_size
    worker_class.__init__(worker, *args, **kwargs)
    return worker


def execute(worker: Worker, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs a method in the worker's process, futures among the arguments resolved there; for backends."""
    return getattr(worker, method)(
        *map(resolve, args), **{name: resolve(argument) for name, argument in kwargs.items()}
    )
