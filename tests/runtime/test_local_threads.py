import os
import threading
from functools import partial

import pytest
import torch

from tandem.checkpoint.background import BackgroundWrite
from tandem.runtime import Dispatch, LocalBackend, ResourcePool, Worker, WorkerGroup, register


def multiply():
    """Run a kernel that PyTorch divides among threads, and return the number of threads of this process."""
    torch.ones(1 << 20).mul_(2)
    return len(os.listdir("/proc/self/task"))


class Beside(Worker):
    in_thread = True

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def multiply(self) -> int:
        return multiply()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    others = set(threading.enumerate())
    yield
    torch.set_num_threads(before)
    for thread in set(threading.enumerate()) - others:
        thread.join(30)


def by_worker():
    backend = LocalBackend()
    count = WorkerGroup(backend, partial(Beside), ResourcePool([1]), role="reward").multiply().get()
    backend.shutdown()
    return count


def by_checkpoint():
    found, done, write = [], threading.Event(), BackgroundWrite()
    write.start(lambda: (found.append(multiply()), done.set())[0], None)
    assert done.wait(30)
    write.check()
    return found[0]


@pytest.mark.parametrize("run", [by_worker, by_checkpoint])
def test_a_thread_beside_training_adds_itself_alone(two_threads, run):
    before = multiply()
    assert run() == before + 1
    assert torch.get_num_threads() == 2
