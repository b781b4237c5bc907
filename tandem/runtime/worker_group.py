"""Worker groups: one object with the registered methods of many workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tandem.errors import ConfigError
from tandem.runtime.backend import Backend, Usage
from tandem.runtime.dispatch import Call, Mesh, Registration, divide_batches
from tandem.runtime.expression import Division
from tandem.runtime.future import BatchFuture, Done, Future, Handle
from tandem.runtime.resource_pool import ResourcePool
from tandem.runtime.stream import BatchStream
from tandem.runtime.worker import WorkerFactory, registrations, worker_class


class WorkerGroup:
    """The workers of one role on one pool. Each registered method of their class is a method of the group.

    Args:
        backend: The backend that runs the workers.
        worker: The worker class, or `functools.partial` of it with the arguments of its constructor.
        pool: The processes of the group.
        role: The name of the role, for messages; default: the name of the class.
        balance: Whether methods registered with `balance` divide rows by weight instead of by count.

    Raises:
        ConfigError: The backend cannot provide the pool, or a registered method has the name of a method of
            WorkerGroup.
    """

    def __init__(
        self,
        backend: Backend,
        worker: WorkerFactory,
        pool: ResourcePool,
        *,
        role: str | None = None,
        balance: bool = False,
    ) -> None:
        made = worker_class(worker)
        self._registrations = registrations(made)
        for name in self._registrations:
            if hasattr(type(self), name):
                raise ConfigError(
                    "a worker method has the same name as a method of WorkerGroup",
                    field=f"{made.__name__}.{name}",
                    remedy="rename the method",
                )
        self._class_name = made.__name__
        self._role = role or made.__name__
        self._balance = balance
        self._meshes: dict[str | None, Mesh] = {}
        self._workers = backend.launch(worker, pool, self._role)

    @property
    def world_size(self) -> int:
        return self._workers.world_size

    @property
    def role(self) -> str:
        return self._role

    def take_usage(self) -> list[Usage]:
        """Return the `Usage` of each worker since the last call, in order of rank."""
        return self._workers.take_usage()

    def shutdown(self) -> None:
        """Stop the workers."""
        self._workers.shutdown()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"no registered method '{name}'")
        if name not in self._registrations:
            known = ", ".join(self._registrations)
            raise AttributeError(f"no registered method '{name}' in {self._class_name}: {known}")
        return functools.partial(self._call, name, self._registrations[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._registrations]

    def _call(self, name: str, registration: Registration, /, *args: Any, **kwargs: Any) -> Any:
        mesh = self._mesh(registration) if registration.over_mesh else Mesh.flat(self.world_size)
        dispatch, collect = registration.functions()
        division: Division | None = None
        calls: Sequence[Call | None]
        if self._balance and registration.balance:
            calls, division = divide_batches(mesh, args, kwargs, registration.balance)
        else:
            calls = dispatch(mesh, args, kwargs)
        method = f"{self._class_name}.{name}"
        if registration.stream:
            return BatchStream(self._workers.stream(name, calls), method, mesh)
        keeps = registration.makes_batch and not registration.blocking
        handles = self._workers.call(name, calls, keeps=keeps)
        if keeps:
            return BatchFuture.collected(_collecting(mesh, handles), method, division)
        if registration.makes_batch:
            return self._batch_now(mesh, handles, method, division)
        future = Future(handles, functools.partial(collect, mesh))
        return future.get() if registration.blocking else future

    @staticmethod
    def _batch_now(mesh: Mesh, handles: list[Handle | None], method: str, division: Division | None) -> Any:
        for handle in handles:
            if handle is not None:
                handle.wait()  # workers that do not collect may have failed too
        values = [Done(handle.get(), handle.borrowed) for handle in _collecting(mesh, handles)]
        if all(done.value is None for done in values):
            return None
        return BatchFuture.collected(values, method, division).get()

    def _mesh(self, registration: Registration) -> Mesh:
        """Return the mesh of a method.

        The group reads the mesh from its workers when a call first needs it, because workers may register the
        mesh after construction.
        """
        name = registration.mesh
        if name not in self._meshes:
            everybody: list[Call | None] = [((), {})] * self.world_size
            handles = self._workers.call("meshes", everybody, keeps=False)
            places = [handle.get() for handle in handles if handle is not None]
            known = sorted(set(places[0]).intersection(*places))
            if name not in known and (name is not None or len(known) != 1):
                raise ConfigError(
                    "the workers have not registered this mesh"
                    if name
                    else "the workers registered several meshes or none, so the mesh is not clear",
                    field=f"{self._class_name}, mesh",
                    got=name,
                    expected=f"one of {known}" if known else "a register_mesh call in every worker",
                    remedy=None if name else "name the mesh in @register(..., mesh=...)",
                )
            chosen = name or known[0]
            self._meshes[name] = Mesh(tuple(place[chosen] for place in places), chosen)
        return self._meshes[name]


def _collecting(mesh: Mesh, handles: list[Handle | None]) -> list[Handle]:
    """Return the handles of the ranks that collect, in the order of their data-parallel ranks."""
    return [handle for rank in mesh.collectors if (handle := handles[rank]) is not None]
