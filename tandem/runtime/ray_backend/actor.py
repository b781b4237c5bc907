"""The process of a pool's rank, a Ray actor. One lane runs the calls of all roles placed there, in the order
in which the controller made them. Beside that lane it answers what the controller asks."""

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
"""The cost of each input that was brought to this process. Handles add to it, the lane takes it out."""

PLAIN = (bool, int, float, str)
RemoteCall = tuple[str, str, tuple[Any, ...], Mapping[str, Any]] | bytes
"""Role, method and its arguments; one argument to Ray, which packs each apart. See `packed_call`."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The machine and the network in which a process found itself.

    Attributes:
        place: the process, by the machine's address.
        machine: Ray's id of it.
        interface: of that address.
        cores: of the machine.
    """

    place: Place
    machine: str
    interface: str | None
    cores: int


def packed_index(batch: Any) -> bytes:
    """A batch's index as the controller receives it."""
    return pickle.dumps(Index.of(batch), protocol=5)


def packed_call(role: str, method: str, call: Call) -> RemoteCall:
    """Packs a call for an actor. Ray needs to know nothing of plain values, and bytes cost it the least."""
    args, kwargs = call
    whole = (role, method, args, kwargs)
    plain = all(value is None or type(value) in PLAIN for value in (*args, *kwargs.values()))
    return pickle.dumps(whole, protocol=5) if plain else whole


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


class _Host:
    """One process. The methods of the group "control" answer beside the lane; all others run on it, one after
    the other.

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

    def run(self, packed: RemoteCall) -> Any:
        """Runs a worker's method.

        Raises:
            CallFailed: it raised, or its inputs could not be had.
        """
        role, method, call = self._bound(packed)
        with self._at("running", role, method):
            return call()

    @ray.method(num_returns=2)
    def run_kept(self, packed: RemoteCall) -> tuple[bytes | None, Any]:
        """The result's index for the controller, and the result for whoever uses it."""
        result = self.run(packed)
        return packed_index(result), result

    def run_parts(self, packed: RemoteCall) -> Iterator[tuple[Any, bytes] | DataProto]:
        """Runs a worker's streaming method. Each part's rows and index are for the controller. Then comes the
        part, of which the controller is given a reference of its own: one within what it gets could be gone
        before it is counted there.

        Raises:
            CallFailed: as `run`.
        """
        role, method, call = self._bound(packed)
        with self._at("running", role, method):
            for part in call():
                yield part.rows, packed_index(part.batch)
                yield part.batch

    def _bound(self, packed: RemoteCall) -> tuple[str, str, Callable[[], Any]]:
        """Role, method, and the call with its inputs brought here."""
        role, method, args, kwargs = pickle.loads(packed) if isinstance(packed, bytes) else packed
        with self._at("waiting for the inputs of", role, method):
            here = [resolve(argument, borrowed=True) for argument in args]
            named = {name: resolve(argument, borrowed=True) for name, argument in kwargs.items()}
        return role, method, lambda: getattr(self._workers[role], method)(*here, **named)

    @contextmanager
    def _at(self, state: str, role: str, method: str) -> Iterator[None]:
        """The lane in one state: told to whoever asks, charged to the role, and its exceptions recorded."""
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
        """The record of a call that raised, or of another's failure where that came with the inputs."""
        if isinstance(error, CallFailed):
            return error.record
        trace = _beyond_this_file(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, trace))
        sys.stderr.write(text)
        sys.stderr.flush()
        line = traceback.format_exception_only(error)[-1].strip()
        at, waiting = self._setup, state != "running"
        record = Record(at.pool, at.rank, role, method, line, text, _if_picklable(error), waiting)
        self._failures.append(record)
        return record

    def take_usage(self, role: str) -> Usage:
        """A role's since the last call."""
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
        """The state of the lane, with what it has to tell since it was last asked."""
        state, role, method, since = self._state
        failures, said = _drained(self._failures), _drained(self._said)
        elapsed = time.monotonic() - since
        return Status(state, role, method, elapsed, _resident_bytes(), failures, said)

    @ray.method(concurrency_group="control")
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


Item = TypeVar("Item")


def _drained(items: deque[Item]) -> tuple[Item, ...]:
    """All that is there, taken out; the lane may add to it meanwhile."""
    return tuple(items.popleft() for _ in range(len(items)))


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
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


Actor = Any
"""The handle of a HostActor; Ray's own types know the calls' arguments and results no better."""

HostActor: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})(_Host)  # type: ignore[call-overload]
