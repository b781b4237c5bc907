"""Watches the processes of a run: asks each for its state all the time, waits on the controller's behalf, and
turns the first thing that goes wrong into one report."""

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
from tandem.runtime.ray_backend.together import Together

REASON = 600
"""Characters of Ray's own words on why a process died that the report shows."""
POLL_S = 0.5
"""How often a waiting controller looks whether something failed elsewhere."""
GRACE_S = 3.0
"""How long a call that raised may go unnoticed by the controller before the run is stopped for it: others
may be waiting for that worker, and the controller for them."""
CALLS = 64
"""How many of the last calls of each process are remembered, to say in which one it died."""
STACKS = 8
"""Of how many processes that run for too long the report shows the stack."""
SURVEY_S = 5.0
"""How long the processes have to say what they are doing."""


@dataclass(frozen=True, slots=True)
class Dead:
    """The answer of a process that is no more."""

    why: str

    def __str__(self) -> str:
        return f"dead: {self.why}"


@dataclass(frozen=True, slots=True)
class Silent:
    """The answer of a process that gives none."""

    since_s: float

    def __str__(self) -> str:
        return f"no answer for {self.since_s:.0f} s"


Answer = Status | Dead | Silent


@dataclass(frozen=True, slots=True)
class Sent:
    """A call that was made of a process.

    Attributes:
        role, method: which.
        result: the future result, for as long as anybody holds it.
    """

    role: str
    method: str
    result: weakref.ref[Any]

    def unfinished(self) -> bool:
        """Tells whether somebody holds its result, and there is none."""
        handle = self.result()
        if handle is None:
            return False
        ended, _ = ray.wait([handle.first], timeout=0, fetch_local=False)
        if not ended:
            return True
        try:
            ray.get(handle.first, timeout=0)
        except GetTimeoutError:  # there is one, on another node
            return False
        except RayError:
            return True
        return False


@dataclass(eq=False)
class Watched:
    """A process, the question it has not answered yet, and its last answer."""

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
        """Role and method of the call it has not ended, as far as the controller knows."""
        found = next((sent for sent in self.calls if sent.unfinished()), None)
        return (found.role, found.method) if found else ("", "")


Answers = Mapping[Watched, Answer]


class Watch:
    """The controller's eye on its processes.

    Args:
        call_s: the limit of one method's own run.
        answer_s: the limit of an answer to a question.
        say: is told what workers say to the user.

    Attributes:
        index_bytes, value_bytes: what came to the controller, counted by its handles.
    """

    def __init__(self, *, call_s: float, answer_s: float, say: Callable[[str], None]) -> None:
        self._call_s = call_s
        self._answer_s = answer_s
        self._say = say
        self._processes: dict[Any, Watched] = {}
        """By the actor's id."""
        self._failure: WorkerFailure | None = None
        self._raised: list[tuple[float, Record]] = []
        """Calls that raised and of which the controller was not told yet, and since when they are known."""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.index_bytes = 0
        self.value_bytes = 0

    def add(self, place: Place, actor: Actor) -> None:
        """Watches one more process."""
        with self._lock:
            self._processes[actor._actor_id] = Watched(place, actor)
            if not self._thread.is_alive():
                self._thread.start()

    def sent(self, actor: Actor, role: str, method: str, result: Any) -> None:
        """Remembers a call of a process, and weakly its result, to say later what it was doing."""
        self._processes[actor._actor_id].calls.append(Sent(role, method, weakref.ref(result)))

    def remove(self, pool: str) -> None:
        """Watches the processes of a pool no longer, after passing on what they said last."""
        with self._lock:
            if self._failure is None:
                self._survey()
            staying = {key: known for key, known in self._processes.items() if known.place.pool != pool}
            self._processes = staying

    def close(self) -> None:
        """Ends, after passing on what was said last."""
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
        sign: ray.ObjectRef[Any] | None = None,
        together: Together | None = None,
    ) -> Any:
        """The value behind a reference.

        Args:
            sign: a smaller reference that exists when this one does; None is this one.
            together: of the workers of the same call; `sign` is one of them.

        Raises:
            WorkerFailure: its worker, or another, failed.
            TimeoutError: not there after `timeout_s` seconds.
        """
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        try:
            # Not by short gets: a transfer from another node begins anew with each.
            sign = sign or ref
            together = together or Together([sign])
            while not together.wait(sign, min(POLL_S, _left(deadline))):
                self.check()
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no result after {timeout_s:g} s")
            return together.take(ref, max(POLL_S, min(self._call_s, _left(deadline))))
        except GetTimeoutError:
            self.check()
            raise TimeoutError("the result is there and could not be brought here in time") from None
        except RayError as error:
            failure = self._failure_behind(error)
            raise failure from failure.__cause__

    def ready(self, waitables: Sequence[Any]) -> Any:
        """The first of several references or streams that has something.

        Raises:
            WorkerFailure: a worker failed.
        """
        while True:
            found, _ = ray.wait(list(waitables), timeout=POLL_S, fetch_local=False)
            if found:
                return found[0]
            self.check()

    def check(self) -> None:
        """Raises a failure that is still untold.

        Raises:
            WorkerFailure: something failed that the controller has not been told of, wherever it was.
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
                except Exception as error:  # or nobody would watch any more, and nobody know it
                    self._failure = WorkerFailure(
                        f"the watch over the workers failed: {error}", restartable=True
                    )
                    self._failure.__cause__ = error

    def _failure_behind(self, error: RayError) -> WorkerFailure:
        """The report on a result that cannot be had: whatever failed first, here or elsewhere."""
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
        """Asks everybody, and passes on what they say to the user."""
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
        except ActorUnavailableError:  # its node cannot be reached just now: asked again, the time runs on
            known.question = known.actor.status.remote()
            return Silent(time.monotonic() - known.asked_at)
        except RayError as error:
            return Dead(_why_dead(error, known.seen))
        known.question = None
        now = time.monotonic()
        self._raised += [(now, record) for record in known.seen.failures]
        for sentence in known.seen.said:
            self._say(sentence)
        return known.seen

    def _fault(
        self, answers: Answers, record: Record | None = None, *, patient: bool = False
    ) -> Fault | None:
        """Finds what is wrong, if anything: a death comes before what it made others raise, and that before
        silence and overruns.

        Args:
            record: a call that is known to have raised.
            patient: leave the controller GRACE_S to notice by itself that a call raised.
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
                    f"no answer for {answer.since_s:.0f} s: stopped, in native code that blocks Python, "
                    "short of memory, or its node is gone"
                )
                return Fault(known.place, what, *known.at())
        if any(isinstance(answer, Silent) for answer in answers.values()):
            return None  # whoever has run for too long may be waiting for that one
        return self._overrun(answers)

    def _overrun(self, answers: Answers) -> Fault | None:
        """All that have run for too long are shown: which of them the others wait for is for the reader."""
        busy = [
            (known, answer)
            for known, answer in answers.items()
            if isinstance(answer, Status) and answer.state != "idle"
        ]
        running = [item for item in busy if item[1].state == "running"]
        # Who waits for an input waits for somebody's run, unless nobody runs.
        late = [(known, answer) for known, answer in running or busy if answer.since_s > self._call_s]
        if not late:
            return None
        first, status = late[0]
        stacks = "\n".join(f"{known.place}, {_stacks(known.actor)}" for known, _ in late[:STACKS])
        doing = "running" if running else "waiting for its inputs, and nobody runs,"
        what = f"it has been {doing} for {status.since_s:.0f} s; the limit is {self._call_s:g} s"
        return Fault(first.place, what, status.role, status.method, stacks)

    def _report(self, fault: Fault, answers: Answers) -> WorkerFailure:
        """The report; everything that raised until now is told with it."""
        self._raised.clear()
        others = {known.place: str(answer) for known, answer in answers.items() if known.place != fault.place}
        return fault.report(others)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _why_dead(error: RayError, seen: Status | None) -> str:
    """Ray's reason without its advice, and the memory that the process had."""
    detail = str(error).split("Worker exit detail: ")[-1].split(" Some common causes")[0]
    reason = " ".join(detail.split())[:REASON]
    return reason + (f"; it held {seen.resident_bytes / 2**30:.2f} GiB when last seen" if seen else "")


def _ask_for_stacks(place: Place) -> None:
    """Lets a process that answers nothing write its stacks into its log, by a signal, if it is on this
    machine and alive."""
    if place.node == ray.util.get_node_ip_address():  # type: ignore[no-untyped-call]
        with contextlib.suppress(ProcessLookupError):
            os.kill(place.pid, signal.SIGUSR1)
            time.sleep(POLL_S)


def _stacks(actor: Actor) -> str:
    try:
        stacks: str = ray.get(actor.stacks.remote(lane_only=True), timeout=SURVEY_S)
    except RayError as error:
        return f"not to be had: {error}"
    return stacks
