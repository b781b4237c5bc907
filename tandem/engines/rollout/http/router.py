"""A router that makes several replicas of an engine act as one engine.

Replicas are servers or engines in this process.

Requests are assigned when replicas have free capacity. Requests with the most expected tokens are assigned
first (longest processing time first, Graham 1969), each to the replica with the least expected work. So no
replica has a long response left at the end. Requests of one uid share the prefill of their prompt and, in
later turns, the cached conversation. So all requests of a uid are sent to the same replica, unless this
replica would get far more than an equal share of the work.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

from tandem.engines.rollout.base import (
    SLEEP_TAGS,
    RolloutEngine,
    SharedModule,
    SleepTag,
    WeightSource,
    WeightStream,
)
from tandem.engines.rollout.checks import check_idle, check_new, check_vocabulary
from tandem.engines.rollout.draws.written import Written
from tandem.engines.rollout.http.connection import Refused, ServerLost
from tandem.engines.rollout.http.relay import Outcome, relay
from tandem.engines.weight_sync import Digest
from tandem.errors import EngineError
from tandem.protocol import Request, Sample

Id = tuple[str, int]
P = ParamSpec("P")
T = TypeVar("T")

# If a replica has more than this multiple of an equal share of all work, other replicas may get its uids.
_MOST_SHARE = 1.25
_MOST_UIDS = 1 << 16
_ROUND_S = 0.02  # the maximum time, in seconds, to poll every replica once


class _Job(NamedTuple):
    """A request and its expected number of tokens."""

    request: Request
    work: float


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine and the requests assigned to it."""

    name: str
    engine: RolloutEngine
    given: dict[Id, _Job] = field(default_factory=dict)
    load: float = 0.0
    error: EngineError | None = None

    def give(self, job: _Job) -> None:
        self.given[job.request.id] = job
        self.load += job.work

    def take(self, name: Id) -> _Job:
        job = self.given.pop(name)
        self.load = self.load - job.work if self.given else 0.0
        return job


@dataclass(slots=True)
class _UidHistory:
    """The replica that handles a uid, and the lengths of the uid's responses so far."""

    home: _Replica | None = None
    responses: int = 0
    tokens: int = 0


class Router:
    """A `RolloutEngine` that distributes requests over replicas.

    If a replica raises an EngineError, the replica counts as lost. The other replicas redo the unfinished
    requests, each request once. If the random numbers of the engines are keyed, this changes no sample. If a
    server refuses a request, the error is raised, because the other servers would refuse this request too.

    Args:
        engines: The replicas, with the same weights.
        max_length: The maximum number of tokens of prompt and response together.
        window: The maximum number of requests at a replica: as many as the replica runs at once, or a few
            more.
        vocabulary: The size of the vocabulary. None means that the replicas check the prompt tokens.
        names: The replicas' names, for messages. None means their numbers.
        log: A function that receives a message when a replica is lost.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        max_length: int,
        window: int,
        vocabulary: int | None = None,
        names: Sequence[str] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        names = names or [f"replica {number}" for number in range(len(engines))]
        self._replicas = [_Replica(name, engine) for name, engine in zip(names, engines, strict=True)]
        self._max_length = max_length
        self._window = window
        self._vocabulary = vocabulary
        self._log = log
        self._dropped = False  # whether `sleep` has dropped the weights
        self._waiting: dict[Id, _Job] = {}
        self._histories: OrderedDict[str, _UidHistory] = OrderedDict()

    @property
    def takes(self) -> frozenset[type[SharedModule] | type[WeightStream]]:
        return frozenset.intersection(*(replica.engine.takes for replica in self._replicas))

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Only a replica detects some errors, such as a sampling parameter that the replica does not support.
        The `poll` that assigns the request raises these errors.
        """
        if self._dropped:
            raise EngineError("the engines have no weights: sleep dropped them", remedy="call update_weights")
        pending = {*self._waiting, *(name for replica in self._alive() for name in replica.given)}
        check_new(requests, pending, self._max_length, can_decode=True)
        check_vocabulary(requests, self._vocabulary)
        self._waiting |= {request.id: _Job(request, self._work(request)) for request in requests}
        self._sort()

    def poll(self, timeout_s: float) -> list[Sample]:
        until = time.monotonic() + timeout_s
        while True:
            self._hand_out()
            busy = [replica for replica in self._alive() if replica.given]
            samples = [
                sample for replica in busy for sample in self._poll_replica(replica, _ROUND_S / len(busy))
            ]
            if samples or not self.pending() or time.monotonic() >= until:
                return samples

    def pending(self) -> int:
        return len(self._waiting) + sum(len(replica.given) for replica in self._replicas)

    def abort(self, ids: Sequence[Id], *, keep_partial: bool = False) -> list[Sample]:
        wanted = set(ids)
        here = [self._waiting.pop(name) for name in list(self._waiting) if name in wanted]
        samples = [Written(job.request).sample("abort") for job in here]
        for replica in self._alive():
            there = [replica.take(name).request for name in list(replica.given) if name in wanted]
            if there:
                names = [request.id for request in there]
                written = self._call(replica, replica.engine.abort, names, keep_partial=keep_partial)
                samples += [Written(r).sample("abort") for r in there] if written is None else written
        order = {name: place for place, name in enumerate(ids)}
        return sorted(samples, key=lambda sample: order[sample.id]) if keep_partial else []

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        alive = self._alive()
        if isinstance(source, WeightStream) and len(alive) > 1:
            updates = [partial(replica.engine.update_weights, version=version) for replica in alive]
            outcomes = relay(source, updates)
        else:
            outcomes = [self._update_replica(replica, source, version) for replica in alive]
        digests: dict[str, Digest] = {}
        for replica, outcome in zip(alive, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                self._lose(replica, outcome)
            else:
                digests[replica.name] = outcome
        _check_equal(digests)
        self._dropped = False
        return next(iter(digests.values()))

    @staticmethod
    def _update_replica(replica: _Replica, source: WeightSource, version: int) -> Outcome:
        try:
            return replica.engine.update_weights(source, version)
        except EngineError as error:
            return error

    def sleep(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        check_idle(self.pending())
        for replica in self._alive():
            self._call(replica, replica.engine.sleep, tags)
        self._dropped |= "weights" in tags and bool(self.takes)

    def wake(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        for replica in self._alive():
            self._call(replica, replica.engine.wake, tags)

    def close(self) -> None:
        with ExitStack() as stack:
            for replica in self._replicas:
                stack.callback(replica.engine.close)

    def progress(self) -> int:
        return sum(replica.engine.progress() for replica in self._replicas)

    def stats(self) -> dict[str, float]:
        """Return the sum of each counter over the replicas. For `cache_use`, return the maximum."""
        total: dict[str, float] = {}
        for replica in self._replicas:
            for name, value in replica.engine.stats().items():
                shared = name == "cache_use"
                total[name] = max(total.get(name, 0.0), value) if shared else total.get(name, 0.0) + value
        return total

    def _alive(self) -> list[_Replica]:
        """Return the replicas that are not lost.

        Raises:
            EngineError: All replicas are lost.
        """
        alive = [replica for replica in self._replicas if replica.error is None]
        if not alive:
            raise EngineError(
                "all replicas are lost",
                got="\n".join(f"{replica.name}: {replica.error}" for replica in self._replicas),
                expected="at least one working replica",
                remedy="check the first error of each replica; restart the servers and resume the run",
            )
        return alive

    def _work(self, request: Request) -> float:
        """Return the expected number of tokens of a request."""
        history = self._histories.get(request.uid)
        new = (
            history.tokens / history.responses if history and history.responses else request.params.max_tokens
        )
        return len(request.prompt_ids) + min(new, request.params.max_tokens)

    def _sort(self) -> None:
        """Sort the waiting requests by uid. The uid with the most expected tokens comes first."""
        works: dict[str, float] = {}
        for request, work in self._waiting.values():
            works[request.uid] = works.get(request.uid, 0.0) + work
        ordered = sorted(self._waiting.items(), key=lambda item: (-works[item[1].request.uid], item[0]))
        self._waiting = dict(ordered)

    def _hand_out(self) -> None:
        """Assign waiting requests to replicas that have free capacity.

        Raises:
            EngineError: A replica refuses a request. The request is then waiting again, with all requests
                that were assigned together with it.
        """
        alive = self._alive()
        if not self._waiting or all(len(replica.given) >= self._window for replica in alive):
            return  # the usual case; returning early avoids a loop over many waiting requests
        work = sum(job.work for job in self._waiting.values()) + sum(replica.load for replica in alive)
        batches: dict[_Replica, list[Request]] = {}
        for leftovers in (False, True):
            given = []
            for name, job in self._waiting.items():
                free = [replica for replica in alive if len(replica.given) < self._window]
                if not free:
                    break
                chosen = self._choice(job, free, work / len(alive), leftovers)
                if len(chosen.given) < self._window:
                    chosen.give(job)
                    given.append(name)
                    batches.setdefault(chosen, []).append(job.request)
            for name in given:
                del self._waiting[name]
        refused = [self._submit_to(replica, batch) for replica, batch in batches.items()]
        for error in refused:
            if error is not None:
                raise error

    def _choice(self, job: _Job, free: Sequence[_Replica], share: float, leftover: bool) -> _Replica:
        """Return the replica that should get a request.

        This is the replica that already handles the request's uid, even if it has no free capacity. If there
        is none, it is the least loaded replica with free capacity.

        Args:
            job: The request.
            free: The replicas with free capacity.
            share: Each replica's equal share of all work, in tokens.
            leftover: Whether this is the second pass over the waiting requests. The first pass offers each
                replica only the requests of its own uids and of unassigned uids.
        """
        history, least = self._history_of(job.request.uid), min(free, key=lambda replica: replica.load)
        if history.home is None or history.home.error is not None:
            history.home = least
        behind = bool(history.home.given) and history.home.load + job.work > _MOST_SHARE * share
        return least if behind or (leftover and least.load < history.home.load / 2) else history.home

    def _submit_to(self, replica: _Replica, batch: list[Request]) -> EngineError | None:
        try:
            replica.engine.submit(batch)
        except ServerLost as error:
            self._lose(replica, error)
        except EngineError as error:
            self._waiting |= {request.id: replica.take(request.id) for request in batch}
            return error
        return None

    def _history_of(self, uid: str) -> _UidHistory:
        history = self._histories.setdefault(uid, _UidHistory())
        self._histories.move_to_end(uid)
        if len(self._histories) > _MOST_UIDS:
            self._histories.popitem(last=False)
        return history

    def _poll_replica(self, replica: _Replica, timeout_s: float) -> Iterator[Sample]:
        for sample in self._call(replica, replica.engine.poll, timeout_s) or ():
            replica.take(sample.id)
            history = self._history_of(sample.uid)
            history.responses += 1
            history.tokens += len(sample.token_ids)
            yield sample

    def _call(self, replica: _Replica, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """Call a replica and return its result, or None if the replica is lost.

        Raises:
            Refused: The server refuses the call. A refused rollout request is no longer pending.
        """
        try:
            return call(*args, **options)
        except Refused as error:
            if error.request in replica.given:
                replica.take(error.request)
            raise
        except EngineError as error:
            self._lose(replica, error)
            return None

    def _lose(self, replica: _Replica, error: EngineError) -> None:
        """Mark a replica as lost and put its requests back at the head of the queue."""
        replica.error = error
        unfinished = {name: replica.take(name) for name in list(replica.given)}
        self._waiting = unfinished | self._waiting
        with suppress(EngineError):  # the first error is the one to report
            replica.engine.abort(list(unfinished))
        with suppress(EngineError):
            replica.engine.close()
        if self._log is not None:
            self._log(
                f"rollout: lost {replica.name}; other replicas redo {len(unfinished)} requests: {error}"
            )
        self._alive()


def _check_equal(digests: dict[str, Digest]) -> None:
    """Check that all replicas hold the same weights.

    Args:
        digests: The digest of each replica, by the replica's name.

    Raises:
        EngineError: A tensor differs between two replicas. The message names the first one.
    """
    (first, expected), *others = digests.items()
    for name, digest in others:
        for tensor in sorted(expected.keys() | digest.keys()):
            if expected.get(tensor) != digest.get(tensor):
                raise EngineError(
                    "replicas hold different weights",
                    field=tensor,
                    got=f"{name}: {digest.get(tensor, 'missing')}",
                    expected=f"as {first}: {expected.get(tensor, 'missing')}",
                    remedy="start all replicas with the same model in the same precision",
                )
