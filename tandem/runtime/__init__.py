"""The runtime: one controller that calls methods of many workers.

This package has the registered methods of workers, the dispatch of calls, futures, resource pools and
backends.
"""

from tandem.runtime.backend import Backend, StreamPart, Usage, Workers
from tandem.runtime.dispatch import Dispatch, Mesh, MeshPlace
from tandem.runtime.future import BatchFuture, Future
from tandem.runtime.handle import Handle
from tandem.runtime.index import Index
from tandem.runtime.local_backend import LocalBackend
from tandem.runtime.resource_pool import Placement, ResourcePool, Role
from tandem.runtime.stream import BatchStream
from tandem.runtime.worker import BaseWorker, Part, Worker, WorkerFactory, register
from tandem.runtime.worker_group import WorkerGroup

__all__ = [
    "Backend",
    "BaseWorker",
    "BatchFuture",
    "BatchStream",
    "Dispatch",
    "Future",
    "Handle",
    "Index",
    "LocalBackend",
    "Mesh",
    "MeshPlace",
    "Part",
    "Placement",
    "ResourcePool",
    "Role",
    "StreamPart",
    "Usage",
    "Worker",
    "WorkerFactory",
    "WorkerGroup",
    "Workers",
    "register",
]
