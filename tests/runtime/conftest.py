"""Backends and worker groups for the tests of the controller."""

import itertools
from collections.abc import Callable
from importlib import import_module

import pytest

from tandem.runtime import Backend, ResourcePool, WorkerGroup
from tests.runtime.multi_worker import ThreadBackend


@pytest.fixture
def threads():
    backend = ThreadBackend()
    yield backend
    backend.shutdown()


def ray_backend() -> Backend:
    """Return a backend on the Ray of this test process.

    Ray is imported late, so that pytest can collect the folder without Ray.
    """
    backend: Backend = import_module("tandem.runtime.ray_backend").RayBackend()
    return backend


@pytest.fixture(scope="module", params=[ThreadBackend, ray_backend])
def backend(request, ray_cluster):
    """Return each backend that runs several workers; all tests of a file share it."""
    made: Backend = request.param()
    yield made
    made.shutdown()


Start = Callable[..., WorkerGroup]


@pytest.fixture
def start(backend):
    """Return a function from (worker, processes, balance=False) to a group.

    Groups of the same size share their processes.
    """
    groups: list[WorkerGroup] = []
    number = itertools.count()

    def started(worker, processes, *, balance=False):
        pool = ResourcePool([processes], f"pool_of_{processes}", on_device=False)
        groups.append(WorkerGroup(backend, worker, pool, role=f"role_{next(number)}", balance=balance))
        return groups[-1]

    yield started
    for group in groups:
        group.shutdown()
