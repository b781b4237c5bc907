"""Watch the processes of a run.

The watch regularly requests the state of every process, waits for results for the controller, and reports the
first failure.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from tandem.errors import TandemError, WorkerFailure
from tandem.runtime.failure import CallFailed, Fault, Place, Record, Status, first_failure
from tandem.runtime.ray_backend.actor import Actor
from tandem.runtime.ray_backend.result_group import ResultGroup

REASON = 600
"""The maximum length of Ray's reason for the death of a process in the report, in characters."""
POLL_S = 0.5
"""The time, in seconds, between two checks for failures of other processes while the controller waits."""
GRACE_S = 3.0
"""The time, in seconds, in which the controller should notice by itself that a call raised an exception.

After this time the run is stopped. Other workers may be waiting for the worker whose call raised, and the
controller may be waiting for them.
"""
CALLS = 64
"""The number of recent calls stored per process, to report the call during which the process died."""
STACKS = 8
"""The maximum number of stacks of too slow processes in the report."""
SURVEY_S = 5.0
"""The time limit, in seconds, for the processes to report their state."""


@dataclass(frozen=True, slots=True)
class Dead:
    """The answer of a process that has died."""

    why: str

    def __str__(self) -> str:
        return f"dead: {self.why}"


@dataclass(frozen=True, slots=True)
class Silent:
    """The state of a process that does not answer."""

    since_s: float

    def __str__(self) -> str:
        return f"no answer for {self.since_s:.0f} s"


Answer = Status | Dead | Silent


@dataclass(frozen=True, slots=True)
class Sent:
    """A call that was sent to a process.

    Attributes:
        role: The role of the worker.
        method: The method.
        result: A weak reference to the handle of the result.
    """

    role: str
    method: str
    result: weakref.ref[Any]

    def unfinished(self) -> bool:
        """Return whether the result's handle still exists, but the result does not exist yet."""
        handle = self.result()
        if handle is None:
            return False
        ended, _ = ray.wait([handle.first], timeout=0, fetch_local=False)
        if not ended:
            return True
        try:
            ray.get(handle.first, timeout=0)
        except GetTimeoutError:  # the result exists on another node
            return False
        except RayError:
            return True
        return False


@dataclass(eq=False)
class Watched:
    """A watched process, with its pending status request and its last answer."""

    place: Place
    actor: Actor
    question: ray.ObjectRef[Status] | None = None
    asked_at: float = 0.0
    seen: Status | None = None
    calls: deque[Sent] = field(default_factory=lambda: deque(maxlen=CALLS))

    def ask(self) -> ray.ObjectRef[Status]:
        if self.question is None:
            self.question, self.asked_at = self.actor.status.remote(), time.monotonic()
        return self.question

    def at(self) -> tuple[str, str]:
        """Return role and method of the process's unfinished call, as far as the controller knows."""
        found = next((sent for sent in self.calls if sent.unfinished()), None)
        return (found.role, found.method) if found else ("", "")


Answers = Mapping[Watched, Answer]


class Watch:
    """The controller's monitor of its processes.

    Args:
        call_s: The time limit of one call, without waiting for its inputs.
        answer_s: The time limit of an answer to a status request.
        say: Prints the workers' messages for the user.

    Attributes:
        index_bytes: Bytes of indices that the controller received, as counted by its handles.
        value_bytes: Bytes of batches that the controller received, as counted by its handles.
    """

    def __init__(self, *, call_s: float, answer_s: float, say: Callable[[str], None]) -> None:
        self._call_s = call_s
        self._answer_s = answer_s
        self._say = say
        self._processes: dict[Any, Watched] = {}
        """A dict from the actor's id to the watched process."""
        self._failure: WorkerFailure | None = None
        self._raised: list[tuple[float, Record]] = []
        """Failed calls that the controller has not noticed yet, with the times when the watch noticed them.
        """
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.index_bytes = 0
        self.value_bytes = 0

    def add(self, place: Place, actor: Actor) -> None:
        """Start to watch a process."""
        with self._lock:
            self._processes[actor._actor_id] = Watched(place, actor)
            if not self._thread.is_alive():
                self._thread.start()

    def sent(self, actor: Actor, role: str, method: str, result: Any) -> None:
        """Store a call of a process, with a weak reference to its result, for later reports."""
        self._processes[actor._actor_id].calls.append(Sent(role, method, weakref.ref(result)))

    def remove(self, pool: str) -> None:
        """Stop watching the processes of a pool, after their last messages were shown."""
        with self._lock:
            if self._failure is None:
                self._survey()
            staying = {key: known for key, known in self._processes.items() if known.place.pool != pool}
            self._processes = staying

    def close(self) -> None:
        """Stop watching, after the last messages were shown."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
            if self._failure is None:
                self._survey()

    def get(
        self,
        ref: ray.ObjectRef[Any],
        timeout_s: float | None = None,
        *,
        marker: ray.ObjectRef[Any] | None = None,
        group: ResultGroup | None = None,
    ) -> Any:
        """Return the value of a reference.

        Args:
            ref: The reference.
            timeout_s: The longest time to wait, in seconds; None waits without a limit.
            marker: A reference to a smaller object that exists as soon as `ref` exists; None: `ref` itself.
            group: The results of all workers of the same call, including `marker`.

        Raises:
            WorkerFailure: The worker of this result, or another worker, failed.
            TimeoutError: The value does not exist after `timeout_s` seconds.
        """
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        try:
            # Repeated short calls of ray.get would not work: each would restart a transfer between nodes.
            marker = marker or ref
            group = group or ResultGroup([marker])
            while not group.wait(marker, min(POLL_S, _left(deadline))):
                self.check()
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no result after {timeout_s:g} s")
            return group.take(ref, max(POLL_S, min(self._call_s, _left(deadline))))
        except GetTimeoutError:
            self.check()
            raise TimeoutError("the result exists, but it could not be fetched in time") from None
        except RayError as error:
            failure = self._failure_behind(error)
            raise failure from failure.__cause__

    def ready(self, waitables: Sequence[Any]) -> Any:
        """Return the first of several references or streams that has a value.

        Raises:
            WorkerFailure: A worker failed.
        """
        while True:
            found, _ = ray.wait(list(waitables), timeout=POLL_S, fetch_local=False)
            if found:
                return found[0]
            self.check()

    def check(self) -> None:
        """Raise an error if a process has failed and the controller does not know yet.

        Raises:
            WorkerFailure: A call or a process has failed.
        """
        failure = self._failure
        if failure is not None:
            raise failure from failure.__cause__

    def _run(self) -> None:
        while not self._closed.wait(min(5.0, self._answer_s / 6)):
            with self._lock:
                if self._failure is not None:
                    continue
                try:
                    answers = self._survey()
                    fault = self._fault(answers, patient=True)
                    if fault is not None:
                        self._failure = self._report(fault, answers)
                except Exception as error:  # without this, the watch would end unnoticed
                    self._failure = WorkerFailure(
                        f"the watch over the workers failed: {error}", restartable=True
                    )
                    self._failure.__cause__ = error

    def _failure_behind(self, error: RayError) -> WorkerFailure:
        """Return the report for a result that cannot be fetched, about the first failure in any process."""
        with self._lock:
            if self._failure is not None:
                return self._failure
            answers = self._survey()
            cause = error.cause if isinstance(error, RayTaskError) else None
            record = cause.record if isinstance(cause, CallFailed) else None
            fault = self._fault(answers, record)
            if fault is None:
                user = cause if isinstance(cause, TandemError) else None
                failure = WorkerFailure(str(user or f"a call failed: {error}"), restartable=user is None)
                failure.__cause__ = user
                return failure
            return self._report(fault, answers)

    def _survey(self) -> Answers:
        """Ask all processes for their state, and show their messages to the user."""
        open_questions = [known.ask() for known in self._processes.values()]
        if open_questions:
            ray.wait(open_questions, num_returns=len(open_questions), timeout=SURVEY_S)
        return {known: self._answer(known) for known in self._processes.values()}

    def _answer(self, known: Watched) -> Answer:
        assert known.question is not None
        try:
            known.seen = ray.get(known.question, timeout=0)
        except GetTimeoutError:
            return Silent(time.monotonic() - known.asked_at)
        except ActorUnavailableError:  # its node cannot be reached now: ask again, and keep the time limit
            known.question = known.actor.status.remote()
            return Silent(time.monotonic() - known.asked_at)
        except RayError as error:
            return Dead(_why_dead(error, known.seen))
        known.question = None
        now = time.monotonic()
        self._raised += [(now, record) for record in known.seen.failures]
        for sentence in known.seen.messages:
            self._say(sentence)
        return known.seen

    def _fault(
        self, answers: Answers, record: Record | None = None, *, patient: bool = False
    ) -> Fault | None:
        """Return the fault of the run; None if there is no fault.

        A dead process has priority over calls that raised an exception, because its death may have caused the
        exceptions. Such calls have priority over processes that do not answer or run too long.

        Args:
            answers: The answer of each process.
            record: The record of a call that is known to have failed.
            patient: Whether to give the controller GRACE_S seconds to notice a failed call by itself.
        """
        for known, answer in answers.items():
            if isinstance(answer, Dead):
                return Fault(known.place, f"its process died ({answer.why})", *known.at())
        known_since = time.monotonic() - (GRACE_S if patient else 0)
        raised = [each for since, each in self._raised if since <= known_since]
        first = first_failure([*raised, *([record] if record else [])])
        if first is not None:
            places = {(known.place.pool, known.place.rank): known.place for known in answers}
            place = places[first.pool, first.rank]
            return Fault(place, first.error, first.role, first.method, first.trace, first.cause)
        for known, answer in answers.items():
            if isinstance(answer, Silent) and answer.since_s > self._answer_s:
                _ask_for_stacks(known.place)
                what = (
                    f"no answer for {answer.since_s:.0f} s: the process may be stopped, inside native code "
                    "that blocks Python or out of memory, or its node may be gone"
                )
                return Fault(known.place, what, *known.at())
        if any(isinstance(answer, Silent) for answer in answers.values()):
            return None  # a process that runs too long may be waiting for the silent one
        return self._overrun(answers)

    def _overrun(self, answers: Answers) -> Fault | None:
        """Return the fault of processes that have run too long, or None.

        The report shows the stacks of these processes. The reader has to find out which process the other
        processes wait for.
        """
        busy = [
            (known, answer)
            for known, answer in answers.items()
            if isinstance(answer, Status) and answer.state != "idle"
        ]
        running = [item for item in busy if item[1].state == "running"]
        # A process that waits for an input waits for a running process, unless none is running.
        late = [(known, answer) for known, answer in running or busy if answer.since_s > self._call_s]
        if not late:
            return None
        first, status = late[0]
        stacks = "\n".join(f"{known.place}, {_stacks(known.actor)}" for known, _ in late[:STACKS])
        doing = "running" if running else "waiting for its inputs, while no process runs,"
        what = f"it has been {doing} for {status.since_s:.0f} s; the limit is {self._call_s:g} s"
        return Fault(first.place, what, status.role, status.method, stacks)

    def _report(self, fault: Fault, answers: Answers) -> WorkerFailure:
        """Return the report, which includes all failed calls so far."""
        self._raised.clear()
        others = {known.place: str(answer) for known, answer in answers.items() if known.place != fault.place}
        return fault.report(others)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _why_dead(error: RayError, seen: Status | None) -> str:
    """Return Ray's reason for a death, without Ray's advice, and the last known memory use of the process."""
    detail = str(error).split("Worker exit detail: ")[-1].split(" Some common causes")[0]
    reason = " ".join(detail.split())[:REASON]
    return reason + (f"; it held {seen.resident_bytes / 2**30:.2f} GiB when last seen" if seen else "")


def _ask_for_stacks(place: Place) -> None:
    """Send a signal that makes a silent process write its stacks to its log.

    This works only if the process is alive and on this machine.
    """
    if place.node == ray.util.get_node_ip_address():  # type: ignore[no-untyped-call]
        with contextlib.suppress(ProcessLookupError):
            os.kill(place.pid, signal.SIGUSR1)
            time.sleep(POLL_S)


def _stacks(actor: Actor) -> str:
    try:
        stacks: str = ray.get(actor.stacks.remote(lane_only=True), timeout=SURVEY_S)
    except RayError as error:
        return f"stack not available: {error}"
    return stacks
