"""One controller, many workers: registered methods, dispatch, futures, pools and backends."""

from tandem.runtime.backend import Backend, Workers
from tandem.runtime.dispatch import Dispatch, Mesh, MeshPlace
from tandem.runtime.future import BatchFuture, Future, Handle
from tandem.runtime.index import Index
from tandem.runtime.local_backend import LocalBackend
from tandem.runtime.resource_pool import Placement, ResourcePool, Role
from tandem.runtime.worker import BaseWorker, Worker, register
from tandem.runtime.worker_group import WorkerGroup

__all__ = [
    "Backend",
    "BaseWorker",
    "BatchFuture",
    "Dispatch",
    "Future",
    "Handle",
    "Index",
    "LocalBackend",
    "Mesh",
    "MeshPlace",
    "Placement",
    "ResourcePool",
    "Role",
    "Worker",
    "WorkerGroup",
    "Workers",
    "register",
]
