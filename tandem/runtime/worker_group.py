"""WorkerGroup: many workers as one object with their registered methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tandem.errors import ConfigError
from tandem.runtime.backend import Backend
from tandem.runtime.dispatch import Mesh, Registration
from tandem.runtime.future import BatchFuture, Done, Future, Handle
from tandem.runtime.resource_pool import ResourcePool
from tandem.runtime.worker import Worker, registrations


class WorkerGroup:
    """The workers of one class on one pool. Each registered method of the class is a method of the group.

    Args:
        backend: where the workers run.
        worker_class: what runs there.
        pool: how many, on which nodes.
        args, kwargs: for the constructor of every worker.

    Raises:
        ConfigError: the backend cannot give the pool, or a method has the name of one of the group's own.
    """

    def __init__(
        self,
        backend: Backend,
        worker_class: type[Worker],
        pool: ResourcePool,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._registrations = registrations(worker_class)
        for name in self._registrations:
            if hasattr(type(self), name):
                raise ConfigError(
                    "a worker method has the name of a WorkerGroup's own",
                    field=f"{worker_class.__name__}.{name}",
                    remedy="rename the method",
                )
        self._class_name = worker_class.__name__
        self._meshes: dict[str | None, Mesh] = {}
        self._workers = backend.launch(worker_class, pool, args, kwargs)

    @property
    def world_size(self) -> int:
        return self._workers.world_size

    def shutdown(self) -> None:
        """Ends the workers."""
        self._workers.shutdown()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in self._registrations:
            raise AttributeError(
                f"no registered method '{name}'"
                + (
                    ""
                    if name.startswith("_")
                    else f" in {self._class_name}: {', '.join(self._registrations)}"
                )
            )
        return functools.partial(self._call, name, self._registrations[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._registrations]

    def _call(self, name: str, registration: Registration, /, *args: Any, **kwargs: Any) -> Any:
        mesh = self._mesh(registration) if registration.over_mesh else Mesh.flat(self.world_size)
        dispatch, collect = registration.functions()
        handles: list[Handle | None] = [
            None if call is None else self._workers.call(rank, name, *call)
            for rank, call in enumerate(dispatch(mesh, args, kwargs))
        ]
        if registration.makes_batch:
            collecting = [handle for rank in mesh.collectors if (handle := handles[rank]) is not None]
            return self._batch(f"{self._class_name}.{name}", handles, collecting, registration.blocking)
        future = Future(handles, functools.partial(collect, mesh))
        return future.get() if registration.blocking else future

    def _batch(
        self, method: str, handles: list[Handle | None], collecting: list[Handle], blocking: bool
    ) -> Any:
        if not blocking:
            return BatchFuture.collected(collecting, method)
        for handle in handles:
            if handle is not None:
                handle.wait()  # a worker that does not collect may have failed too
        values = [handle.get() for handle in collecting]
        if all(value is None for value in values):
            return None
        return BatchFuture.collected([Done(value) for value in values], method).get()

    def _mesh(self, registration: Registration) -> Mesh:
        """The mesh of a method; asked of the workers once, when first needed, as they may register
        it after construction."""
        name = registration.mesh
        if name not in self._meshes:
            handles = [self._workers.call(rank, "meshes", (), {}) for rank in range(self.world_size)]
            places = [handle.get() for handle in handles]
            known = sorted(set(places[0]).intersection(*places))
            if name not in known and (name is not None or len(known) != 1):
                raise ConfigError(
                    "the workers have not registered this mesh"
                    if name
                    else "it is not clear which mesh to use",
                    field=f"{self._class_name}, mesh",
                    got=name,
                    expected=f"one of {known}" if known else "a register_mesh call in every worker",
                    remedy=None if name else "name the mesh in @register(..., mesh=...)",
                )
            chosen = name or known[0]
            self._meshes[name] = Mesh(tuple(place[chosen] for place in places), chosen)
        return self._meshes[name]
