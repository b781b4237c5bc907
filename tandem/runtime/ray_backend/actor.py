"""The Ray actor for the process of one rank of a pool.

One thread, the main lane, runs the calls of all roles in this process, in the order in which the controller
made the calls. Other threads answer the controller's status requests at the same time.
"""

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
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import ray
import torch
import torch.distributed as dist

from tandem.device import set_threads
from tandem.errors import ConfigError
from tandem.protocol import DataProto
from tandem.runtime.backend import Usage
from tandem.runtime.dispatch import Call
from tandem.runtime.failure import CallFailed, Place, Record, Status, log_header
from tandem.runtime.future import resolve
from tandem.runtime.index import Index
from tandem.runtime.ray_backend.cluster import interface_of
from tandem.runtime.worker import Worker, WorkerFactory, create
from tandem.trusted import TRUST

INPUTS: list[Usage] = []
"""The cost of each input that was copied to this process.

Handles add entries, and the main lane removes the entries.
"""

PLAIN = (bool, int, float, str)
RemoteCall = tuple[str, str, tuple[Any, ...], Mapping[str, Any]] | bytes
"""Role, method and arguments as one argument for Ray, because Ray packs every argument separately.

See `packed_call`.
"""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The machine and the network in which a process runs.

    Attributes:
        place: The process, with the machine's address.
        machine: Ray's id of the machine.
        interface: The network interface that has the machine's address.
        cores: The number of CPU cores of the machine.
    """

    place: Place
    machine: str
    interface: str | None
    cores: int


def packed_index(batch: Any) -> bytes:
    """Return a batch's index as a pickle, for the controller."""
    return pickle.dumps(Index.of(batch), protocol=5)


def packed_call(role: str, method: str, call: Call) -> RemoteCall:
    """Pack a call for an actor.

    A call without Ray references is pickled here, because Ray sends bytes fastest.
    """
    args, kwargs = call
    whole = (role, method, args, kwargs)
    plain = all(value is None or type(value) in PLAIN for value in (*args, *kwargs.values()))
    return pickle.dumps(whole, protocol=5) if plain else whole


@dataclass(frozen=True)
class Setup:
    """The settings that a process needs to become a rank of a pool.

    Attributes:
        pool: The name of the pool.
        rank: The rank of the process.
        world_size: The number of processes in the pool.
        cwd: The controller's working folder.
        path: The controller's import path.
        log: The file for all output of this process, including the output of libraries and child processes.
        trusted: The files with code that the controller trusts, see `tandem.trusted.trust`.
    """

    pool: str
    rank: int
    world_size: int
    cwd: str
    path: tuple[str, ...]
    log: Path
    trusted: str


class _Host:
    """The actor class for one process of a pool.

    The methods of the group "control" run in parallel to the main lane. All other methods run on the main
    lane, one after the other.

    Args:
        setup: The settings of this process.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._workers: dict[str, Worker] = {}
        self._usage: dict[str, Usage] = {}
        self._state = ("idle", "", "", time.monotonic())
        self._lane = 0
        self._failures: deque[Record] = deque()
        self._messages: deque[str] = deque()
        self._store: Any = None  # a reference keeps the rendezvous server alive
        if os.path.isdir(setup.cwd):
            os.chdir(setup.cwd)
        os.environ[TRUST] = setup.trusted
        sys.path[:] = list(dict.fromkeys([*setup.path, *sys.path]))
        self._log = _redirect_output(setup.log)
        faulthandler.enable(self._log, all_threads=True)
        faulthandler.register(signal.SIGUSR1, self._log, all_threads=True)

    def serve_rendezvous(self, address: str, port: int, timeout_s: float) -> int:
        """Make this process the rendezvous server of its pool's process group.

        Args:
            address: The address of this machine.
            port: The port to listen on; 0: a free port.
            timeout_s: The timeout of the process group, in seconds.

        Returns:
            The port.

        Raises:
            ConfigError: The port is in use.
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
                remedy="set another port, or 0 for a free port",
            ) from error
        self._store = store
        return int(store.port)

    def join(self, environment: Mapping[str, str], defaults: Mapping[str, str], threads: int) -> None:
        """Set the environment variables of `torch.distributed` and the number of CPU threads.

        Args:
            environment: Variables to set.
            defaults: Variables to set only if the machine's environment does not have them.
            threads: The number of threads of CPU kernels.
        """
        os.environ.update({**defaults, **os.environ, **environment})
        set_threads(threads)

    def create(self, role: str, factory: WorkerFactory) -> None:
        """Create the worker of a role. An earlier worker of the same role is removed first."""
        if role in self._workers:
            self.remove(role)
        self._usage[role] = Usage()
        with self._at("running", role, "__init__"):
            worker = create(factory, self._setup.rank, self._setup.world_size, tell=self._messages.append)
        self._workers[role] = worker

    def remove(self, role: str) -> None:
        """Remove the worker of a role and free the memory of its models."""
        self._workers.pop(role, None)
        gc.collect()  # sharded modules contain reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(self, packed: RemoteCall) -> Any:
        """Run a worker's method.

        Raises:
            CallFailed: The method raised an exception, or an input could not be fetched.
        """
        role, method, call = self._bound(packed)
        with self._at("running", role, method):
            return call()

    @ray.method(num_returns=2)
    def run_kept(self, packed: RemoteCall) -> tuple[bytes | None, Any]:
        """Run a worker's method, and return the index for the controller and the result for other workers."""
        result = self.run(packed)
        return packed_index(result), result

    def run_parts(self, packed: RemoteCall) -> Iterator[tuple[Any, bytes] | DataProto]:
        """Run a worker's streaming method.

        For each part, the generator yields two objects: first the part's rows and index for the controller,
        then the batch. The batch is a separate object, because Ray could free an object that is only
        referenced inside another result before the controller has counted its reference.

        Raises:
            CallFailed: The method raised an exception, or an input could not be fetched.
        """
        role, method, call = self._bound(packed)
        with self._at("running", role, method):
            for part in call():
                yield part.rows, packed_index(part.batch)
                yield part.batch

    def _bound(self, packed: RemoteCall) -> tuple[str, str, Callable[[], Any]]:
        """Return the role, the method, and the call with its inputs already fetched."""
        role, method, args, kwargs = pickle.loads(packed) if isinstance(packed, bytes) else packed
        with self._at("waiting for the inputs of", role, method):
            here = [resolve(argument, borrowed=True) for argument in args]
            named = {name: resolve(argument, borrowed=True) for name, argument in kwargs.items()}
        return role, method, lambda: getattr(self._workers[role], method)(*here, **named)

    @contextmanager
    def _at(self, state: str, role: str, method: str) -> Iterator[None]:
        """Set the state of the main lane during a block, for `status`.

        The time of the block counts for the role's usage, and exceptions are recorded.
        """
        start = time.monotonic()
        self._lane = threading.get_ident()
        self._state = (state, role, method, start)
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            raise CallFailed(self._record(error, state, role, method)) from None
        finally:
            spent = sum(INPUTS, self._usage.get(role, Usage()))
            INPUTS.clear()
            if state == "running":
                spent += Usage(busy_s=time.monotonic() - start)
            self._usage[role] = spent
            self._state = ("idle", "", "", time.monotonic())

    def _record(self, error: BaseException, state: str, role: str, method: str) -> Record:
        """Return the record of a call that raised an exception.

        If the exception came with an input, return the record of the other call that failed.
        """
        if isinstance(error, CallFailed):
            return error.record
        trace = _without_own_frames(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace))
        sys.stderr.write(text)
        sys.stderr.flush()
        line = traceback.format_exception_only(error)[-1].strip()
        at, waiting = self._setup, state != "running"
        record = Record(at.pool, at.rank, role, method, line, text, _if_picklable(error), waiting)
        self._failures.append(record)
        return record

    def take_usage(self, role: str) -> Usage:
        """Return a role's usage since the last call."""
        taken, self._usage[role] = self._usage[role], Usage()
        return taken

    @ray.method(concurrency_group="control")
    def whereabouts(self) -> Whereabouts:
        at = self._setup
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        place = Place(at.pool, at.rank, at.world_size, address, os.getpid(), at.log)
        machine = ray.get_runtime_context().get_node_id()
        return Whereabouts(place, machine, interface_of(address), os.cpu_count() or 1)

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        """Return the state of the main lane, with the failures and messages since the last call."""
        state, role, method, since = self._state
        failures, said = _drain(self._failures), _drain(self._messages)
        elapsed = time.monotonic() - since
        return Status(state, role, method, elapsed, _resident_bytes(), failures, said)

    @ray.method(concurrency_group="control")
    def stacks(self, *, lane_only: bool = False) -> str:
        """Return the Python stacks of all threads. The main lane's stack is first.

        Args:
            lane_only: Whether to return only the thread that runs the workers' methods.
        """
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        idents = sorted(frames.keys() - {threading.get_ident()}, key=lambda ident: ident != self._lane)
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frames[ident]))}"
            for ident in (idents[:1] if lane_only else idents)
        )

    def close(self) -> None:
        """Leave the process group together with the other ranks."""
        self._workers.clear()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


Item = TypeVar("Item")


def _drain(items: deque[Item]) -> tuple[Item, ...]:
    """Remove and return all items; the main lane may add items at the same time."""
    return tuple(items.popleft() for _ in range(len(items)))


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames in this file, unless all frames are in this file."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return inner or trace


def _if_picklable(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:  # a user's exception may fail when it is rebuilt; the record still has its text
        return None


def _redirect_output(log: Path) -> Any:
    """Append all later output of this process and its child processes to the file."""
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
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


Actor = Any
"""The handle of a HostActor. Ray's types do not describe arguments and results of calls either."""

HostActor: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})(_Host)  # type: ignore[call-overload]
