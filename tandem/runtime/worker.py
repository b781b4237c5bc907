"""The base class of workers, and the decorator `register` for their methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

from tandem.errors import ConfigError
from tandem.protocol import DataProto
from tandem.runtime.dispatch import CollectFn, Dispatch, DispatchFn, MeshPlace, Registration
from tandem.runtime.future import resolve

Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "__tandem_registration__"


class Worker:
    """The base class of workers, which run in the processes of a group and have registered methods.

    Attributes:
        rank: The rank, 0 … world_size-1. The attribute is set before `__init__` of the subclass runs.
        world_size: The number of workers in the group.
        tell: A function that shows a message to the user. A backend may replace it on the instance.
        in_thread: Whether a backend that has all workers in one process may run this worker's methods in a
            thread, next to other workers. Set it for workers that mostly wait for other processes or servers.
    """

    rank: int = 0
    world_size: int = 1
    in_thread: ClassVar[bool] = False
    tell: Callable[[str], None] = staticmethod(functools.partial(print, flush=True))
    _meshes: dict[str, MeshPlace]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker._meshes = {}
        return worker

    def register_mesh(self, name: str, dp_rank: int, dp_size: int, collects: bool = True) -> None:
        """Register this worker's data-parallel rank in the mesh `name`, for methods with ND_COMPUTE_PROTO.

        Args:
            name: The name of the mesh.
            dp_rank: The data-parallel rank, 0 … dp_size-1, which determines the rows that this worker gets.
                Tensor, sequence and pipeline ranks that work on the same rows have the same dp_rank.
            dp_size: The number of data-parallel ranks.
            collects: Whether the group uses this worker's results. Exactly one worker per dp_rank must
                collect, such as tensor rank 0 of the last pipeline stage.
        """
        self._meshes[name] = MeshPlace(dp_rank, dp_size, collects)

    def close(self) -> None:
        """Release resources that would outlive the worker; a method may still be running."""

    def meshes(self) -> dict[str, MeshPlace]:
        """Return a dict from mesh name to this worker's `MeshPlace`."""
        return dict(self._meshes)


BaseWorker = Worker

WorkerFactory = type[Worker] | functools.partial[Worker]
"""A worker class, or `functools.partial` of a worker class with the arguments of its constructor."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some samples of a streaming method's result, which the method yields.

    Attributes:
        rows: The row numbers of the samples in the worker's complete result. Together, the parts have each
            row number 0 … B-1 exactly once.
        batch: The samples, in the order of `rows`.
    """

    rows: Sequence[int]
    batch: DataProto


def register(
    dispatch_mode: Dispatch | tuple[DispatchFn, CollectFn] = Dispatch.DP_COMPUTE_PROTO,
    blocking: bool = True,
    *,
    collect: Literal["all", "first"] = "all",
    mesh: str | None = None,
    balance: str | None = None,
    stream: bool = False,
) -> Callable[[Method], Method]:
    """Make a method of a Worker callable on a WorkerGroup; the method itself does not change.

    Args:
        dispatch_mode: A member of Dispatch, or a pair of functions (dispatch, collect).
        blocking: Whether a call waits for the result. False returns a future at once: a BatchFuture if the
            results are batches to concatenate, else a Future.
        collect: "all" combines the results as `dispatch_mode` defines. "first" uses the result of the first
            worker that collects; choose it if all workers return equal results, such as metrics that are
            already reduced over ranks.
        mesh: The name of the mesh for ND_COMPUTE_PROTO. None: the only mesh that the workers registered.
        balance: The ragged column whose row lengths are balanced over data-parallel ranks, in a group with
            balancing. The rows of the result have the order of the input rows. The method must return one row
            per input row, or not a batch.
        stream: Whether the method is a generator of Part. The group's method then returns a BatchStream.

    Raises:
        ConfigError: `dispatch_mode` is not a mode, options cannot be combined, or the function is already
            registered.
    """

    def mark(method: Method) -> Method:
        found = vars(method).get(_MARK)
        of_wrapped = getattr(getattr(method, "__wrapped__", None), _MARK, None)  # copied by functools.wraps
        if found is not None and found is not of_wrapped:
            raise ConfigError(
                "this function is registered twice, and the second registration would replace the first",
                field=method.__qualname__,
                got=found.dispatch_mode,
                remedy="keep only one @register, or define a separate function for each",
            )
        setattr(method, _MARK, Registration(dispatch_mode, blocking, collect, mesh, balance, stream))
        return method

    return mark


def registrations(worker_class: type[Worker]) -> dict[str, Registration]:
    """Return a dict from method name to registration, for all registered methods.

    A method that overrides a registered method need not be registered again.
    """
    found: dict[str, Registration] = {}
    for base in reversed(worker_class.__mro__):
        for name, member in vars(base).items():
            if hasattr(member, _MARK):
                found[name] = getattr(member, _MARK)
    return found


def worker_class(factory: WorkerFactory) -> type[Worker]:
    """Return the class whose instances a factory creates.

    Raises:
        ConfigError: The factory is neither a worker class nor a partial of a worker class.
    """
    made = factory.func if isinstance(factory, functools.partial) else factory
    if not (isinstance(made, type) and issubclass(made, Worker)):
        raise ConfigError(
            "this is not a worker class",
            got=repr(made),
            expected="a subclass of tandem.runtime.Worker, or functools.partial of one with its arguments",
        )
    return made


def create(
    factory: WorkerFactory, rank: int, world_size: int, *, tell: Callable[[str], None] | None = None
) -> Worker:
    """Create the worker of one rank; for backends.

    Args:
        factory: The worker class, or a partial of it.
        rank: The rank of the worker.
        world_size: The number of workers in the group.
        tell: A replacement for `Worker.tell`, which is set before the constructor runs.
    """
    made = worker_class(factory)
    args, kwargs = (factory.args, factory.keywords) if isinstance(factory, functools.partial) else ((), {})
    worker = made.__new__(made, *args, **kwargs)
    worker.rank, worker.world_size = rank, world_size
    if tell is not None:
        worker.tell = tell
    made.__init__(worker, *args, **kwargs)
    return worker


def execute(worker: Worker, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a method in the worker's process, after resolving futures among the arguments; for backends."""
    return getattr(worker, method)(
        *map(resolve, args), **{name: resolve(argument) for name, argument in kwargs.items()}
    )
