from importlib import import_module

import pytest

from tandem.runtime import ResourcePool, WorkerGroup
from tests.runtime.multi_worker import ThreadBackend


@pytest.fixture
def threads():
    backend = ThreadBackend()
    yield backend
    backend.shutdown()


def ray_backend():
    """Return a backend on this process's Ray, imported late, so that pytest collects without Ray."""
    return import_module("tandem.runtime.ray_backend").RayBackend()


@pytest.fixture(scope="module", params=[ThreadBackend, ray_backend])
def backend(request, ray_cluster):
    """Return each backend that runs several workers; all tests of a file share it."""
    made = request.param()
    yield made
    made.shutdown()


@pytest.fixture
def start(backend):
    """Return a function that makes groups; those of the same size share their processes."""
    groups = []

    def started(worker, processes, *, balance=False):
        pool = ResourcePool([processes], f"pool_of_{processes}", on_device=False)
        groups.append(WorkerGroup(backend, worker, pool, role=f"role_{len(groups)}", balance=balance))
        return groups[-1]

    yield started
    for group in groups:
        group.shutdown()
