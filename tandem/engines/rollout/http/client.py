"""A rollout engine whose requests run on a server: what all of them have in common.

The caller's thread hands requests in and takes samples out; in the connection's thread each request is a
task. A subclass says how a request is spelt and its answer read.
"""

from __future__ import annotations

import asyncio
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing, suppress
from typing import Any, ClassVar

from tandem.engines.rollout.base import SLEEP_TAGS, SharedModule, SleepTag, WeightSource, WeightStream
from tandem.engines.rollout.checks import check_idle, check_new, check_vocabulary
from tandem.engines.rollout.counters import Counters
from tandem.engines.rollout.http.answer import Answer
from tandem.engines.rollout.http.connection import CLOSING_S, Connection, Refused, Server, ServerLost
from tandem.engines.weight_sync import Digest
from tandem.errors import EngineError
from tandem.protocol import Request, Sample

STREAM_INTERVAL = 16
"""Tokens of one event of a stream, where the client may choose: an event costs it about 0.1 ms."""


class HTTPEngine(ABC):
    """A `RolloutEngine` on a server. An engine that can give its server new weights overrides `takes`,
    `update_weights`, `give_back` and `take_again`.

    A failed request is reported by `poll`, once, after the samples that were finished before it; it is no
    longer pending then, and the others go on.

    Args:
        server: where the server is.
        max_length: tokens of prompt and response together, at most.
        max_num_seqs: requests sent at the same time.
        vocabulary: tokens of the model, as far as prompts use them; None: not checked here.
        log: receives a line about every two seconds of work; None for none.

    Attributes:
        max_length, vocabulary: as given.
        route, streams: where requests are posted, and whether the answer comes as a stream of events.
        version: of the weights; stamped on each token as it arrives.
        takes: as in the protocol.
        finds_stops: whether stop strings are found, by the server or here.
        has_weights: whether it can be asked for responses.
    """

    takes: frozenset[type[SharedModule] | type[WeightStream]] = frozenset()
    finds_stops = True
    has_weights = True
    route: ClassVar[str]
    streams: ClassVar[bool]

    def __init__(
        self,
        server: Server,
        *,
        max_length: int,
        max_num_seqs: int = 256,
        vocabulary: int | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.server = server
        self.vocabulary = vocabulary
        self.version = 0
        self.max_length = max_length
        self._connection = Connection(server, kept=max_num_seqs)
        self._connected = False
        self._answers: dict[tuple[str, int], Answer] = {}
        self._ended: queue.SimpleQueue[tuple[Answer, Sample | BaseException]] = queue.SimpleQueue()
        self._failure: tuple[Answer, BaseException] | None = None
        self._counters = Counters(log)
        self._asleep: set[SleepTag] = set()
        # The connection's thread alone writes these; but `_count` sets what was prefilled to 0.
        self._tasks: dict[Answer, asyncio.Task[Sample]] = {}
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._running = self._written = self._prefilled = 0

    @abstractmethod
    async def connect(self) -> None:
        """Asks the server what it is, once, before the first request.

        Raises:
            EngineError: a server that cannot be used.
        """

    @abstractmethod
    def check(self, request: Request) -> None:
        """Refuses what the server, as `connect` found it, does not offer.

        Raises:
            EngineError: names the parameter.
        """

    @abstractmethod
    def body(self, answer: Answer) -> dict[str, Any]:
        """The request of an answer that is still empty, as the server's JSON."""

    @abstractmethod
    def read(self, event: dict[str, Any], answer: Answer) -> str | None:
        """Adds to `answer` what a part of the server's answer brings.

        Returns:
            "stop" or "length" with the last part, None before.

        Raises:
            EngineError: not what was asked for.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        if self._connection.closed:
            raise EngineError("the engine is closed", got=self.server.url, remedy="make a new one")
        if not self.has_weights:
            raise EngineError(
                "the server has no weights: none were sent, or sleep has dropped them",
                got=self.server.url,
                remedy="call update_weights before submit",
            )
        self.wake()
        check_new(requests, self._answers, self.max_length, self.finds_stops)
        check_vocabulary(requests, self.vocabulary)
        if not self._connected:
            self._connection.wait(self.connect())
            self._connected = True
        for request in requests:
            self.check(request)
        for request in requests:
            answer = self._answers[request.id] = Answer(request, self.server.url + self.route)
            self._connection.loop.call_soon_threadsafe(self._start, answer)

    def poll(self, timeout_s: float) -> list[Sample]:
        """Waits for the first sample, and takes what else is there."""
        kept, self._failure = self._failure, None
        if kept is not None:
            raise kept[1]
        until = time.monotonic() + timeout_s
        samples: list[Sample] = []
        while self._answers:
            try:
                answer, result = self._ended.get(timeout=0 if samples else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if self._answers.get(answer.request.id) is not answer:
                continue  # aborted when it had just ended
            del self._answers[answer.request.id]
            if isinstance(result, Sample):
                samples.append(result)
            elif samples:
                self._failure = answer, result
                break
            else:
                raise result
        self._count()
        running = self._running
        self._counters.line(running, max(0, len(self._answers) - running), 0.0)
        return samples

    def pending(self) -> int:
        return len(self._answers)

    def abort(self, ids: Sequence[tuple[str, int]], *, keep_partial: bool = False) -> list[Sample]:
        """Closes the requests' connections, upon which the server ends them too."""
        dropped = [self._answers.pop(name) for name in dict.fromkeys(ids) if name in self._answers]
        if self._failure is not None and self._failure[0].request.id in ids:
            self._failure = None
        if dropped:
            with suppress(ServerLost):  # what hangs is cut off here, and would hide why it was
                self._connection.wait(self.cancel(dropped), CLOSING_S)
        return [answer.sample("abort") for answer in dropped] if keep_partial else []

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        raise EngineError(
            f"{type(self).__name__} cannot give its server new weights",
            got=self.server.url,
            remedy="train with rollout.name=native, vllm or sglang",
        )

    @staticmethod
    def stream_of(source: WeightSource) -> WeightStream:
        """The source, which must be a stream."""
        if not isinstance(source, WeightStream):
            raise EngineError(
                "a server takes weights as a stream", got=type(source).__name__, expected="a WeightStream"
            )
        return source

    def sleep(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        check_idle(self.pending())
        awake = [tag for tag in SLEEP_TAGS if tag in tags and tag not in self._asleep]
        if awake:
            self._asleep.update(self.give_back(awake))

    def wake(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        asleep = [tag for tag in SLEEP_TAGS if tag in tags and tag in self._asleep]
        if asleep:
            self.take_again(asleep)
            self._asleep.difference_update(asleep)

    def give_back(self, tags: Sequence[SleepTag]) -> Collection[SleepTag]:
        """Let the server give memory back.

        Returns:
            what it has given back, which may be more than was asked for; nothing here.
        """
        return ()

    def take_again(self, tags: Sequence[SleepTag]) -> None:  # noqa: B027
        """Let the server take memory again that it has given back."""

    def close(self) -> None:
        if not self._connection.closed:
            self.abort(list(self._answers))
            self._connection.close()

    def progress(self) -> int:
        self._count()
        return self._counters.written

    def stats(self) -> dict[str, float]:
        """`decode_steps`, `cache_bytes` and `preemptions` are the server's affair, and 0."""
        self._count()
        return self._counters.take()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """See `Connection.ask`."""
        return self._connection.wait(self.ask(method, path, **options))

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """See `Connection.ask`."""
        return await self._connection.ask(method, path, **options)

    def failure(self, message: str, path: str, got: object, **parts: Any) -> EngineError:
        """An error that names the server."""
        return EngineError(message, got=f"{self.server.url}{path}: {got}", **parts)

    def _count(self) -> None:
        self._counters.wrote(self._written - self._counters.written)
        self._counters.prefill_tokens += self._prefilled
        self._prefilled = 0

    # In the connection's thread:

    def _start(self, answer: Answer) -> None:
        task = self._tasks[answer] = self._connection.loop.create_task(self._run(answer))
        task.add_done_callback(lambda _: self._end(answer))

    def _end(self, answer: Answer) -> None:
        task = self._tasks.pop(answer)
        if not task.cancelled():
            self._ended.put((answer, task.exception() or task.result()))

    async def cancel(self, answers: Sequence[Answer]) -> None:
        """Ends the tasks of these, and with them their connections."""
        tasks = [self._tasks[answer] for answer in answers if answer in self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, answer: Answer) -> Sample:
        async with self._slots:
            self._running += 1
            self._counters.running(self._running)
            try:
                async with asyncio.timeout(self.server.request_timeout_s):
                    return await self._answered(answer)
            except TimeoutError:
                raise ServerLost(
                    f"no whole answer in {self.server.request_timeout_s:g} s",
                    field=f"request {answer.request.id}",
                    got=f"{answer.url}: {len(answer.token_ids)} tokens",
                    remedy="look at the server's log, or raise rollout.server.request_timeout",
                ) from None
            except EngineError as error:
                if isinstance(error, Refused):
                    error.request = answer.request.id
                error.field = error.field or f"request {answer.request.id}, {len(answer.token_ids)} tokens in"
                raise
            finally:
                self._running -= 1

    async def _answered(self, answer: Answer) -> Sample:
        parts = self._connection.events(self.route, self.body(answer), streams=self.streams)
        async with aclosing(parts):
            async for event in parts:
                before = len(answer.token_ids)
                if "error" in event:
                    raise answer.failure("the server gave up", event["error"])
                try:
                    reason = self.read(event, answer)
                except (KeyError, IndexError, TypeError, ValueError) as error:
                    raise answer.failure(
                        "the answer has another form", f"{type(error).__name__} {error}"
                    ) from error
                self._prefilled += 0 if before else len(answer.request.prompt_ids)
                self._written += len(answer.token_ids) - before
                if reason is not None:
                    return answer.whole(reason)
        raise ServerLost(
            "the answer ended before it was whole",
            field=f"request {answer.request.id}",
            got=f"{answer.url}: {len(answer.token_ids)} tokens",
        )
