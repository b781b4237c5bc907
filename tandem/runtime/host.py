"""The process of a pool's rank, as the backend's actor sees it: the workers of all roles placed there, run by
one lane of calls; and, beside that lane, what the controller asks about it."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tandem.device import set_threads
from tandem.errors import ConfigError
from tandem.runtime.backend import Usage
from tandem.runtime.failure import CallFailed, Record, Status, log_header
from tandem.runtime.future import resolve
from tandem.runtime.worker import Part, Worker, WorkerFactory, create
from tandem.trusted import TRUST


class Inputs:
    """The cost of bringing inputs to this process, so far. Handles add to it, the lane reads it."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        self.transfer_s = 0.0
        self.transfer_bytes = 0

    def take(self) -> Usage:
        taken = Usage(0.0, self.wait_s, self.transfer_s, self.transfer_bytes)
        self.__init__()  # type: ignore[misc]
        return taken


INPUTS = Inputs()


@dataclass(frozen=True)
class Setup:
    """The facts that a process needs to become a rank.

    Attributes:
        pool, rank, world_size: which one.
        cwd, path: the controller's working folder and import path.
        log: the file for all that is printed here, by libraries and child processes too.
        trusted: the files with code that the controller trusts, see `tandem.trusted.trust`.
    """

    pool: str
    rank: int
    world_size: int
    cwd: str
    path: tuple[str, ...]
    log: Path
    trusted: str


class Host:
    """One process. All methods but `status` and `stacks` are called on the lane, one after the other.

    Args:
        setup: who this is.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._workers: dict[str, Worker] = {}
        self._usage: dict[str, Usage] = {}
        self._state = ("idle", "", "", time.monotonic())
        self._lane = 0
        self._failures: deque[Record] = deque()
        self._said: deque[str] = deque()
        self._store: Any = None  # kept: the meeting point goes with it
        if os.path.isdir(setup.cwd):
            os.chdir(setup.cwd)
        os.environ[TRUST] = setup.trusted
        sys.path[:] = list(dict.fromkeys([*setup.path, *sys.path]))
        self._log = _redirect_output(setup.log)
        faulthandler.enable(self._log, all_threads=True)
        faulthandler.register(signal.SIGUSR1, self._log, all_threads=True)

    def serve_rendezvous(self, address: str, port: int, timeout_s: float) -> int:
        """Makes this process the meeting point of its pool's process group.

        Args:
            port: where to listen; 0 takes a free one.

        Returns:
            the port.

        Raises:
            ConfigError: the port is taken.
        """
        timeout = timedelta(seconds=timeout_s)
        world_size = self._setup.world_size
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, world_size, True, timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            raise ConfigError(
                "the process group cannot listen on this port",
                field="trainer.cluster.master_port",
                got=f"{address}:{port}: {str(error).splitlines()[0]}",
                remedy="name another port, or 0 for a free one",
            ) from error
        self._store = store
        return int(store.port)

    def join(self, environment: Mapping[str, str], defaults: Mapping[str, str], threads: int) -> None:
        """Sets what `torch.distributed` reads, and the threads of CPU kernels.

        Args:
            defaults: what counts only where the machine's own environment does not say it.
        """
        os.environ.update({**defaults, **os.environ, **environment})
        set_threads(threads)

    def create(self, role: str, factory: WorkerFactory) -> None:
        """Makes the worker of a role; one of the same role that was here goes first."""
        if role in self._workers:
            self.remove(role)
        self._usage[role] = Usage()
        with self._at("running", role, "__init__"):
            worker = create(factory, self._setup.rank, self._setup.world_size, tell=self._said.append)
        self._workers[role] = worker

    def remove(self, role: str) -> None:
        """Drops the worker of a role, and gives back what its models held."""
        self._workers.pop(role, None)
        gc.collect()  # sharded modules refer to themselves
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def execute(self, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a worker's method.

        Raises:
            CallFailed: it raised, or its inputs could not be had.
        """
        call = self._bound(role, method, args, kwargs)
        with self._at("running", role, method):
            return call()

    def parts(
        self, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[Part]:
        """Runs a worker's streaming method.

        Raises:
            CallFailed: as `execute`.
        """
        call = self._bound(role, method, args, kwargs)
        with self._at("running", role, method):
            yield from call()

    def _bound(
        self, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[], Any]:
        """The call with its inputs brought here."""
        with self._at("waiting for the inputs of", role, method):
            here = [resolve(argument, borrowed=True) for argument in args]
            named = {name: resolve(argument, borrowed=True) for name, argument in kwargs.items()}
        return lambda: getattr(self._workers[role], method)(*here, **named)

    def _at(self, state: str, role: str, method: str) -> _Stay:
        return _Stay(self, state, role, method)

    def take_usage(self, role: str) -> Usage:
        """A role's since the last call."""
        taken, self._usage[role] = self._usage[role], Usage()
        return taken

    def status(self) -> Status:
        """The state of the lane, with what it has to tell since it was last asked."""
        state, role, method, since = self._state
        failures, said = _drained(self._failures), _drained(self._said)
        elapsed = time.monotonic() - since
        return Status(state, role, method, elapsed, _resident_bytes(), failures, said)

    def stacks(self, *, lane_only: bool = False) -> str:
        """The Python stacks of all threads, the lane's first.

        Args:
            lane_only: only the one that runs the workers' methods.
        """
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        idents = sorted(frames.keys() - {threading.get_ident()}, key=lambda ident: ident != self._lane)
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident]))}"
            for ident in (idents[:1] if lane_only else idents)
        )

    def close(self) -> None:
        """Leaves the process group together with the others."""
        self._workers.clear()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


class _Stay:
    """The lane in one state: told to whoever asks, charged to the role, and its exceptions recorded."""

    def __init__(self, host: Host, state: str, role: str, method: str) -> None:
        self._host = host
        self._call = (state, role, method)

    def __enter__(self) -> None:
        self._start = time.monotonic()
        self._host._lane = threading.get_ident()
        self._host._state = (*self._call, self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        host, (state, role, _) = self._host, self._call
        spent = INPUTS.take()
        if state == "running":
            spent += Usage(busy_s=time.monotonic() - self._start)
        host._usage[role] = host._usage.get(role, Usage()) + spent
        host._state = ("idle", "", "", time.monotonic())
        if error is not None and not isinstance(error, GeneratorExit):
            raise CallFailed(self._record(kind, error, trace)) from None

    def _record(
        self, kind: type[BaseException] | None, error: BaseException, trace: TracebackType | None
    ) -> Record:
        """The record of a call that raised, or of another's failure where that came with the inputs."""
        if isinstance(error, CallFailed):
            return error.record
        host, (state, role, method) = self._host, self._call
        text = "".join(traceback.format_exception(kind, error, _beyond_this_file(trace)))
        sys.stderr.write(text)
        sys.stderr.flush()
        line = traceback.format_exception_only(error)[-1].strip()
        at = host._setup
        waiting = state != "running"
        record = Record(at.pool, at.rank, role, method, line, text, _if_picklable(error), waiting)
        host._failures.append(record)
        return record


Item = TypeVar("Item")


def _drained(items: deque[Item]) -> tuple[Item, ...]:
    """All that is there, taken out; the lane may add to it meanwhile."""
    taken = []
    while items:
        taken.append(items.popleft())
    return tuple(taken)


def _beyond_this_file(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without its first frames, those of the host, unless there are no others."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return inner or trace


def _if_picklable(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:  # whatever a user's exception does when it is rebuilt; the record says it in words
        return None


def _redirect_output(log: Path) -> Any:
    """Everything printed from here on, by child processes too, goes to the end of the file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = log.open("ab", buffering=0)
    file.write(f"{log_header(os.getpid())}\n".encode())
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    return file


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
