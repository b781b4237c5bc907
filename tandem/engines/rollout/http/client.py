"""The base class of rollout engines that send their requests to an inference server.

The caller's thread submits requests and receives samples. A second thread runs the connection, with one task
per request. A subclass defines the format of requests and answers.
"""

from __future__ import annotations

import asyncio
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, ClassVar

from tandem.engines.rollout.base import SLEEP_TAGS, SharedModule, SleepTag, WeightSource, WeightStream
from tandem.engines.rollout.checks import check_idle, check_new, check_vocabulary
from tandem.engines.rollout.counters import Counters
from tandem.engines.rollout.http.answer import Answer
from tandem.engines.rollout.http.connection import CLOSING_S, Connection, Refused, Server, ServerLost
from tandem.engines.rollout.http.process import ServerProcess
from tandem.engines.weight_sync import Digest
from tandem.errors import EngineError
from tandem.protocol import Request, Sample

STREAM_INTERVAL = 16
"""Tokens per event of a stream, if the client may choose. An event costs the client about 0.1 ms."""
_DYING_S = 5.0  # a server that has lost one of its processes ends within this time


class HTTPEngine(ABC):
    """The base class of a `RolloutEngine` that uses an inference server.

    A subclass that can send new weights to its server overrides `takes`, `send_weights`, `give_back` and
    `take_again`.

    `poll` reports a failed request once, after the samples that finished before it. The request is then no
    longer pending, and the other requests continue.

    Args:
        server: The server's address and time limits.
        max_length: The maximum number of tokens of prompt and response together.
        max_num_seqs: The maximum number of requests that are open at the same time.
        vocabulary: The size of the vocabulary. None means that prompt tokens are not checked here.
        process: The server's process, if the server was started for this engine. `close` ends the process.
        log: A function that receives a log line about every two seconds of work. None means no log.

    Attributes:
        max_length: See `Args`.
        vocabulary: See `Args`.
        route: The path for POST requests.
        streams: Whether the answer is a stream of events.
        version: The version of the weights. Each token gets the version that is current when the token
            arrives.
        takes: See `RolloutEngine.takes`.
        finds_stops: Whether stop strings are supported, by the server or here.
        has_weights: Whether the server has weights and can generate responses.
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
        process: ServerProcess | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.server = server
        self.vocabulary = vocabulary
        self._process = process
        self.version = 0
        self.max_length = max_length
        self._connection = Connection(server, kept=max_num_seqs)
        self._connected = False
        self._answers: dict[tuple[str, int], Answer] = {}
        self._ended: queue.SimpleQueue[tuple[Answer, Sample | BaseException]] = queue.SimpleQueue()
        self._failure: tuple[Answer, BaseException] | None = None
        self._counters = Counters(log)
        self._asleep: set[SleepTag] = set()
        # Only the connection's thread writes these attributes. One exception: `_count` resets `_prefilled` to
        # 0.
        self._tasks: dict[Answer, asyncio.Task[Sample]] = {}
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._running = self._written = self._prefilled = 0

    @abstractmethod
    async def connect(self) -> None:
        """Query the server's properties. `submit` calls this method once, before the first request.

        Raises:
            EngineError: The server cannot be used.
        """

    @abstractmethod
    def check(self, request: Request) -> None:
        """Check that the server supports the request, by the properties that `connect` found.

        Raises:
            EngineError: A parameter is not supported. The message names it.
        """

    @abstractmethod
    def body(self, answer: Answer) -> dict[str, Any]:
        """Return the JSON body of the request. `answer` has no tokens yet."""

    @abstractmethod
    def read(self, event: dict[str, Any], answer: Answer) -> str | None:
        """Append one event of the server's answer to `answer`.

        Args:
            event: The event: a part of a stream, or the whole answer.
            answer: The answer so far.

        Returns:
            "stop" or "length" for the last event, None for earlier events.

        Raises:
            EngineError: The answer does not fit the request.
        """

    def submit(self, requests: Sequence[Request]) -> None:
        if self._connection.closed:
            raise EngineError("the engine is closed", got=self.server.url, remedy="create a new engine")
        if not self.has_weights:
            raise EngineError(
                "the server has no weights: none were sent, or sleep dropped them",
                got=self.server.url,
                remedy="call update_weights before submit",
            )
        self.wake()
        check_new(requests, self._answers, self.max_length, self.finds_stops)
        check_vocabulary(requests, self.vocabulary)
        self.open()
        for request in requests:
            self.check(request)
        for request in requests:
            answer = self._answers[request.id] = Answer(request, self.server.url + self.route)
            self._connection.loop.call_soon_threadsafe(self._start, answer)

    def open(self) -> None:
        """Ask the server for its properties, unless it was asked before (see `connect`)."""
        if not self._connected:
            self._connection.wait(self.connect())
            self._connected = True

    def poll(self, timeout_s: float) -> list[Sample]:
        """Wait until a sample is finished, and return all finished samples.

        Raises:
            EngineError: A request failed. If a server that was started for this engine has died, all requests
                have failed, and the message says that the server died.
        """
        with self._death_named():
            try:
                return self._ready(timeout_s)
            except ServerLost as lost:
                if self._process is not None:
                    lost.field = f"{1 + self.pending()} requests pending, the first: {lost.field}"
                raise

    @contextmanager
    def _death_named(self) -> Iterator[None]:
        """If a server that was started for this engine is lost because it has ended, say so in the error."""
        try:
            yield
        except ServerLost as lost:
            if self._process is not None:
                try:
                    self._process.check(within_s=_DYING_S)
                except EngineError as dead:
                    dead.field = lost.field
                    raise dead from lost
            raise

    def _ready(self, timeout_s: float) -> list[Sample]:
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
                continue  # the request was aborted just after it had ended
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
        """Close the connections of the requests. The server then aborts the requests too."""
        dropped = [self._answers.pop(name) for name in dict.fromkeys(ids) if name in self._answers]
        if self._failure is not None and self._failure[0].request.id in ids:
            self._failure = None
        if dropped:
            with suppress(
                ServerLost
            ):  # a hanging request is cut off here; its error would hide the first one
                self._connection.wait(self.cancel(dropped), CLOSING_S)
        return [answer.finished or answer.sample("abort") for answer in dropped] if keep_partial else []

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        if not self.takes:
            raise EngineError(
                f"{type(self).__name__} cannot give its server new weights",
                got=self.server.url,
                remedy="train with rollout.name=native, vllm or sglang",
            )
        with self._death_named():
            return self.send_weights(self.stream_of(source), version)

    def send_weights(self, stream: WeightStream, version: int) -> Digest:
        """Send new weights to the server and return the digest of what it holds.

        `update_weights` calls this method if `takes` is not empty. This base class sends nothing.

        Raises:
            EngineError: The server refused the weights. It then has no weights.
        """
        return {}

    @staticmethod
    def stream_of(source: WeightSource) -> WeightStream:
        """Return the source if it is a `WeightStream`, and raise an error otherwise."""
        if not isinstance(source, WeightStream):
            raise EngineError(
                "a server takes weights only as a stream",
                got=type(source).__name__,
                expected="a WeightStream",
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
        """Make the server free memory.

        Returns:
            The tags that the server has freed, which may be more than requested. This base class frees
            nothing.
        """
        return ()

    def take_again(self, tags: Sequence[SleepTag]) -> None:  # noqa: B027
        """Make the server allocate the memory that it freed."""

    def close(self) -> None:
        try:
            if not self._connection.closed:
                self.abort(list(self._answers))
                self._connection.close()
        finally:
            if self._process is not None:
                self._process.close()

    def progress(self) -> int:
        self._count()
        return self._counters.written

    def stats(self) -> dict[str, float]:
        """Return the counters. `decode_steps`, `cache_bytes` and `preemptions` are unknown and thus 0."""
        self._count()
        return self._counters.take()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """Send a request to the server and wait for the answer (see `Connection.ask`)."""
        return self._connection.wait(self.ask(method, path, **options))

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Send a request to the server without blocking the thread (see `Connection.ask`)."""
        return await self._connection.ask(method, path, **options)

    def failure(self, message: str, path: str, got: object, **parts: Any) -> EngineError:
        """Return an error that names the server."""
        return EngineError(message, got=f"{self.server.url}{path}: {got}", **parts)

    def _count(self) -> None:
        self._counters.wrote(self._written - self._counters.written)
        self._counters.prefill_tokens += self._prefilled
        self._prefilled = 0

    # The methods below run in the connection's thread.

    def _start(self, answer: Answer) -> None:
        task = self._tasks[answer] = self._connection.loop.create_task(self._run(answer))
        task.add_done_callback(lambda _: self._end(answer))

    def _end(self, answer: Answer) -> None:
        task = self._tasks.pop(answer)
        if task.cancelled():
            return
        if task.exception() is None:
            answer.finished = task.result()
        self._ended.put((answer, task.exception() or task.result()))

    async def cancel(self, answers: Sequence[Answer]) -> None:
        """Cancel the tasks of these answers. This also closes their connections."""
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
                    f"the server did not complete its answer in {self.server.request_timeout_s:g} s",
                    field=f"request {answer.request.id}",
                    got=f"{answer.url}: {len(answer.token_ids)} tokens",
                    remedy="check the server's log, or raise rollout.server.request_timeout",
                ) from None
            except EngineError as error:
                if isinstance(error, Refused):
                    error.request = answer.request.id
                error.field = (
                    error.field or f"request {answer.request.id}, after {len(answer.token_ids)} tokens"
                )
                raise
            finally:
                self._running -= 1

    async def _answered(self, answer: Answer) -> Sample:
        parts = self._connection.events(self.route, self.body(answer), streams=self.streams)
        async with aclosing(parts):
            async for event in parts:
                before = len(answer.token_ids)
                if "error" in event:
                    raise answer.failure("the server reported an error", event["error"])
                try:
                    reason = self.read(event, answer)
                except (KeyError, IndexError, TypeError, ValueError) as error:
                    raise answer.failure(
                        "the server's answer has an unexpected format", f"{type(error).__name__} {error}"
                    ) from error
                self._prefilled += 0 if before else len(answer.request.prompt_ids)
                self._written += len(answer.token_ids) - before
                if reason is not None:
                    return answer.whole(reason)
        raise ServerLost(
            "the server's answer ended before it was complete",
            field=f"request {answer.request.id}",
            got=f"{answer.url}: {len(answer.token_ids)} tokens",
        )
