"""Several replicas of an engine as one: servers, or engines in this process.

Requests are handed out as replicas have room, the most expected tokens first (longest processing time
first, Graham 1969) and each to the replica with the least expected work before it, so that no replica is
left with a long response at the end. Requests of one uid share their prompt's prefill and, in later turns,
what is cached of the conversation: they go to the replica that has the uid, unless that gives it far more
than its share.
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

_WIDE = 1.25  # times its share of all work, beyond which a replica gets nothing for a uid's sake
_REMEMBERED = 1 << 16  # uids
_TURN_S = 0.02  # in which every replica is asked once


class _Job(NamedTuple):
    """A request and the tokens it is expected to take."""

    request: Request
    work: float


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine, and what it has been handed."""

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
class _Seen:
    """The replica that has a uid, and the length of its responses so far."""

    home: _Replica | None = None
    responses: int = 0
    tokens: int = 0


class Router:
    """A `RolloutEngine` over replicas.

    A replica that raises an EngineError is lost: what it had not finished is redone by the others, each
    request once. With engines whose random numbers are keyed, that changes no sample. A request that a server
    refuses is raised: the others would refuse it too.

    Args:
        engines: the replicas, with the same weights.
        max_length: tokens of prompt and response together, at most.
        window: requests that a replica has at a time; those it runs at once, or a few more.
        vocabulary: tokens of the model, as far as prompts use them; None: left to the replicas to check.
        names: of the replicas, for messages; None: their numbers.
        log: is told when a replica is lost.
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
        self._waiting: dict[Id, _Job] = {}
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    @property
    def takes(self) -> frozenset[type[SharedModule] | type[WeightStream]]:
        return frozenset.intersection(*(replica.engine.takes for replica in self._replicas))

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. What only a replica can refuse, such as a sampling parameter it does not know, is
        raised by the `poll` that hands the request out."""
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
            samples = [sample for replica in busy for sample in self._polled(replica, _TURN_S / len(busy))]
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
                written = self._tried(replica, replica.engine.abort, names, keep_partial=keep_partial)
                samples += [Written(r).sample("abort") for r in there] if written is None else written
        return samples if keep_partial else []

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        alive = self._alive()
        if isinstance(source, WeightStream) and len(alive) > 1:
            updates = [partial(replica.engine.update_weights, version=version) for replica in alive]
            outcomes = relay(source, updates)
        else:
            outcomes = [self._updated(replica, source, version) for replica in alive]
        digests: dict[str, Digest] = {}
        for replica, outcome in zip(alive, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                self._lose(replica, outcome)
            else:
                digests[replica.name] = outcome
        _check_equal(digests)
        return next(iter(digests.values()))

    @staticmethod
    def _updated(replica: _Replica, source: WeightSource, version: int) -> Outcome:
        try:
            return replica.engine.update_weights(source, version)
        except EngineError as error:
            return error

    def sleep(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        check_idle(self.pending())
        for replica in self._alive():
            self._tried(replica, replica.engine.sleep, tags)

    def wake(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        for replica in self._alive():
            self._tried(replica, replica.engine.wake, tags)

    def close(self) -> None:
        with ExitStack() as all_of_them:
            for replica in self._replicas:
                all_of_them.callback(replica.engine.close)

    def progress(self) -> int:
        return sum(replica.engine.progress() for replica in self._replicas)

    def stats(self) -> dict[str, float]:
        """Sums over the replicas; of the share of the cache in use, the greatest."""
        total: dict[str, float] = {}
        for replica in self._replicas:
            for name, value in replica.engine.stats().items():
                shared = name == "cache_use"
                total[name] = max(total.get(name, 0.0), value) if shared else total.get(name, 0.0) + value
        return total

    def _alive(self) -> list[_Replica]:
        """The replicas that are not lost.

        Raises:
            EngineError: all are.
        """
        alive = [replica for replica in self._replicas if replica.error is None]
        if not alive:
            raise EngineError(
                "all replicas are lost",
                got="\n".join(f"{replica.name}: {replica.error}" for replica in self._replicas),
                expected="one that works",
                remedy="look at the first error of each; start the servers again and resume",
            )
        return alive

    def _work(self, request: Request) -> float:
        """Tokens to expect of a request."""
        seen = self._seen.get(request.uid)
        new = seen.tokens / seen.responses if seen and seen.responses else request.params.max_tokens
        return len(request.prompt_ids) + min(new, request.params.max_tokens)

    def _sort(self) -> None:
        """The requests of one uid stand together, the uid with the most work first."""
        works: dict[str, float] = {}
        for request, work in self._waiting.values():
            works[request.uid] = works.get(request.uid, 0.0) + work
        ordered = sorted(self._waiting.items(), key=lambda item: (-works[item[1].request.uid], item[0]))
        self._waiting = dict(ordered)

    def _hand_out(self) -> None:
        """Gives waiting requests to replicas that have room.

        Raises:
            EngineError: a request that its replica refuses; it is waiting again, with those handed out with
                it.
        """
        alive = self._alive()
        if not self._waiting or all(len(replica.given) >= self._window for replica in alive):
            return  # most polls, and there may be many waiting
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
        refused = [self._handed(replica, batch) for replica, batch in batches.items()]
        for error in refused:
            if error is not None:
                raise error

    def _choice(self, job: _Job, free: Sequence[_Replica], share: float, leftover: bool) -> _Replica:
        """The replica that should get a request: its uid's home, which may be full, or the least loaded that
        is free.

        Args:
            share: tokens of all work there is, for each replica.
            leftover: whether all that have room were offered the requests at home there, or nowhere, before.
        """
        seen, least = self._known(job.request.uid), min(free, key=lambda replica: replica.load)
        if seen.home is None or seen.home.error is not None:
            seen.home = least
        behind = bool(seen.home.given) and seen.home.load + job.work > _WIDE * share
        return least if behind or (leftover and least.load < seen.home.load / 2) else seen.home

    def _handed(self, replica: _Replica, batch: list[Request]) -> EngineError | None:
        try:
            replica.engine.submit(batch)
        except ServerLost as error:
            self._lose(replica, error)
        except EngineError as error:
            self._waiting |= {request.id: replica.take(request.id) for request in batch}
            return error
        return None

    def _known(self, uid: str) -> _Seen:
        seen = self._seen.setdefault(uid, _Seen())
        self._seen.move_to_end(uid)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return seen

    def _polled(self, replica: _Replica, timeout_s: float) -> Iterator[Sample]:
        for sample in self._tried(replica, replica.engine.poll, timeout_s) or ():
            replica.take(sample.id)
            seen = self._known(sample.uid)
            seen.responses += 1
            seen.tokens += len(sample.token_ids)
            yield sample

    def _tried(self, replica: _Replica, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """Calls a replica. Gives what the call returns; None if it has lost the replica.

        Raises:
            Refused: the server does not have what was asked for; the request, if it was one, is not pending.
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
        """Takes a replica out of service; its requests go back to the head of the queue."""
        replica.error = error
        unfinished = {name: replica.take(name) for name in list(replica.given)}
        self._waiting = unfinished | self._waiting
        with suppress(EngineError):  # it has failed already, and that is what is reported
            replica.engine.abort(list(unfinished))
        with suppress(EngineError):
            replica.engine.close()
        if self._log is not None:
            self._log(f"rollout: {replica.name} is lost, {len(unfinished)} requests are redone: {error}")
        self._alive()


def _check_equal(digests: dict[str, Digest]) -> None:
    """Compares the digests of the replicas, by name.

    Raises:
        EngineError: names the first tensor that two replicas hold differently.
    """
    (first, expected), *others = digests.items()
    for name, digest in others:
        for tensor in sorted(expected.keys() | digest.keys()):
            if expected.get(tensor) != digest.get(tensor):
                raise EngineError(
                    "replicas hold different weights",
                    field=tensor,
                    got=f"{name}: {digest.get(tensor, 'no such tensor')}",
                    expected=f"as {first}: {expected.get(tensor, 'no such tensor')}",
                    remedy="give all replicas the same model in the same precision",
                )
