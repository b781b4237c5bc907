"""Worker, the base of everything that runs on a device; `register`, which offers its methods to a group."""

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
    """One process' part of a group; subclasses hold an engine and register methods.

    Attributes:
        rank: 0 … world_size-1; set before `__init__` of the subclass runs.
        world_size: workers in the group.
        tell: says a sentence to the user; a backend may put its own way of doing so on the instance.
        aside: whether its methods may run beside those of others, where one process has them all: they wait
            for something else than this process.
    """

    rank: int = 0
    world_size: int = 1
    aside: ClassVar[bool] = False
    tell: Callable[[str], None] = staticmethod(functools.partial(print, flush=True))
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

    def close(self) -> None:
        """Gives back what goes on without it; called at most while a method still runs."""

    def meshes(self) -> dict[str, MeshPlace]:
        """This worker's places by mesh name."""
        return dict(self._meshes)


BaseWorker = Worker

WorkerFactory = type[Worker] | functools.partial[Worker]
"""A worker class, or `functools.partial` of one with the arguments of its constructor."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some samples of a streaming method's result.

    Attributes:
        rows: their places in the worker's whole result; all parts together are 0 … B-1, each once.
        batch: the samples, in the order of `rows`.
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
    """Makes a method of a Worker callable on a WorkerGroup; the method itself is unchanged.

    Args:
        dispatch_mode: a member of Dispatch, or a pair of functions (dispatch, collect).
        blocking: False returns a future at once: a BatchFuture where batches are concatenated, else a Future.
        collect: "all" as the mode says; "first" the result of the first worker that collects, for
            results that are the same on every worker, such as metrics already reduced over ranks.
        mesh: the mesh that ND_COMPUTE_PROTO goes over; not needed when the workers registered only one.
        balance: the ragged column by whose row lengths the rows are divided evenly over data-parallel
            ranks, in a group that balances; the results come back in the given order. The method
            returns one row per row, or no batch.
        stream: the method is a generator of Part, and the group's method returns a BatchStream.

    Raises:
        ConfigError: something else in place of a mode, options that do not go together, or a function that is
            registered already.
    """

    def mark(method: Method) -> Method:
        found = vars(method).get(_MARK)
        of_wrapped = getattr(getattr(method, "__wrapped__", None), _MARK, None)  # functools.wraps copies it
        if found is not None and found is not of_wrapped:
            raise ConfigError(
                "registered twice; the second registration would change the first wherever it is used",
                field=method.__qualname__,
                got=found.dispatch_mode,
                remedy="leave one @register, or give each a function of its own",
            )
        setattr(method, _MARK, Registration(dispatch_mode, blocking, collect, mesh, balance, stream))
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


def worker_class(factory: WorkerFactory) -> type[Worker]:
    """The class that a factory makes instances of.

    Raises:
        ConfigError: something else than a worker class or a partial of one.
    """
    made = factory.func if isinstance(factory, functools.partial) else factory
    if not (isinstance(made, type) and issubclass(made, Worker)):
        raise ConfigError(
            "not a worker",
            got=repr(made),
            expected="a subclass of tandem.runtime.Worker, or functools.partial of one with its arguments",
        )
    return made


def create(
    factory: WorkerFactory, rank: int, world_size: int, *, tell: Callable[[str], None] | None = None
) -> Worker:
    """The worker of one rank; for backends.

    Args:
        tell: in place of `Worker.tell`, from the constructor on.
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
    """Runs a method in the worker's process, futures among the arguments resolved there; for backends."""
    return getattr(worker, method)(
        *map(resolve, args), **{name: resolve(argument) for name, argument in kwargs.items()}
    )
