"""Workers that fail in every possible way, in a separate module so that other processes can import it."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from tandem.errors import DataError
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, Worker, register


class Faulty(Worker):
    """A worker that fails as it is told, on the given rank."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fail(self, how: str, rank: int) -> str:
        """Fail on one rank, while the others wait for it in a collective, as in training."""
        print(f"about to {how}")
        if self.rank == rank:
            FAULTS[how]()
        self.total(1.0)
        return "unharmed"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, value: float) -> float:
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        tensor = torch.tensor([value])
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor.item()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double(self, batch: DataProto) -> DataProto:
        if bool((batch.dense("x") < 0).any()):
            raise DataError("negative", field="x", got=batch.dense("x").tolist())
        return DataProto({"x": batch.dense("x") * 2})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def table(self) -> DataProto:
        return DataProto({"x": torch.ones(1000)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def spoil(self, given: DataProto | list[DataProto]) -> float:
        batches = given if isinstance(given, list) else [given]
        total = sum(float(batch.dense("x").sum()) for batch in batches)
        for batch in batches:
            batch.dense("x").zero_()
        return total

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def speak(self, sentence: str) -> None:
        self.tell(sentence)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def spawn(self) -> int:
        """Start a child process that ends when its standard input ends, like those of rewards."""
        self.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        return self.child.pid


def _raise() -> None:
    raise ValueError("the number is wrong")


FAULTS = {
    "raise": _raise,
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: ctypes.string_at(0),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(1000),
    "use all memory": lambda: bytearray(2**50),
}
