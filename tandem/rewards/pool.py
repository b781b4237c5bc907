"""A pool of processes that score responses. A call that hangs or dies costs its own samples alone, and a
process that grows is replaced."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from tandem.config.rewards import RewardConfig
from tandem.errors import RewardError
from tandem.lifetime import make_scratch, remove_scratch
from tandem.rewards.base import Item, Reward, Scored, Scorer, reward_for, scores_of
from tandem.rewards.programs import place_programs
from tandem.rewards.scoring import Call, Scoring

START_SECONDS = 120.0
"""How long a process may take to load the reward."""
SLOW_SECONDS = 30.0
"""After how long without an answer the user hears of it."""
CLOSE_SECONDS = 10.0
"""How long a thread that scores may take to see that the pool is closed."""
CHUNK = 16
"""Calls that a process is sent at a time."""
NEWEST = 4096
"""Samples whose seconds are kept."""
LONGER = "raise reward.timeout; or let failed scores count as nothing: reward.on_error=zero, or drop"


@dataclass(slots=True, eq=False)
class Child:
    """A process of the pool, with the calls it was sent and has not answered.

    Attributes:
        deadline: of its start, then of its first call; infinite while it has nothing to do.
        ready: whether it has started.
    """

    process: BaseProcess
    pipe: Connection
    deadline: float
    calls: deque[Call] = field(default_factory=deque)
    ready: bool = False

    def signal(self) -> None:
        """Tells it and what it started to end."""
        for end in (os.killpg, os.kill):
            try:
                end(self.process.pid or 0, signal.SIGKILL)
            except ProcessLookupError:  # it has no group yet, or has ended
                continue

    def kill(self) -> None:
        """Ends it and what it started."""
        self.signal()
        self.process.join()
        self.pipe.close()


class Pool:
    """The calls of reward functions, in processes of their own. Functions that are `bounded` are called here,
    and without processes (`reward.num_workers=0`) all are.

    Asynchronous calls that wait side by side have one limit together; if that fails, each is called alone.

    Args:
        reward: the user's own; None takes each data source's.
        config: the section of these keys.
        log: the file that receives what functions print.
        say: tells the user of slow calls.

    Attributes:
        counts: "failed", "retried", "timeouts", "died" and "recycled" since they were last cleared.
        failures: of the last batch, by place.
        seconds: that the newest samples took to be scored, their share of a call that was for several.
    """

    def __init__(
        self,
        reward: Scorer | None,
        config: RewardConfig,
        log: Path = Path(os.devnull),
        say: Callable[[str], None] = print,
    ) -> None:
        self.reward, self.config, self.log = reward, config, log
        self.counts: Counter[str] = Counter()
        self.failures: dict[int, RewardError] = {}
        self.seconds = deque[float](maxlen=NEWEST)
        cores = min(8, len(os.sched_getaffinity(0)))
        self._workers = cores if config.num_workers is None else config.num_workers
        place_programs(config.sandbox, self._workers)  # of calls in this process
        self._say = say
        self._scoring = threading.Lock()
        self._closed = False
        self._children: list[Child] = []
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["tandem.rewards.pool"])
        self._scratch = make_scratch("rewards")  # of processes that may be killed
        weakref.finalize(self, remove_scratch, self._scratch)
        weakref.finalize(self, _end, self._children)  # at the program's end it goes first

    def score(self, items: Sequence[Item]) -> list[Scored]:
        """Scores of all items, in their order.

        Raises:
            RewardError: a call failed, and `reward.on_error` is raise; a data source without a reward;
                another thread closed the pool.
        """
        scoring = Scoring(items, self.reward, self.config)
        with self._scoring:
            try:
                self._call_here(scoring)
                if not scoring.done:
                    self._grow(len(scoring.waiting))
                self._heard = time.monotonic()
                while not scoring.done:
                    self._feed(scoring)
                    self._listen(scoring)
            except BaseException:
                _end(self._children)  # calls under way would answer the next batch
                raise
            finally:
                self.failures = scoring.failures
        scores = scoring.scores()
        self.counts += scoring.counts
        return scores

    def close(self) -> None:
        """Ends all processes, and what another thread scores with them."""
        self._closed = True
        for child in list(self._children):
            child.signal()
        # Its thread sees them dead and ends them; one that calls a function itself has no processes.
        if self._scoring.acquire(timeout=CLOSE_SECONDS if self._children else 0):
            _end(self._children)
            self._scoring.release()

    def _call_here(self, scoring: Scoring) -> None:
        elsewhere = deque[Call]()
        while scoring.waiting:
            call = scoring.waiting.popleft()
            if self._workers and not call.reward.bounded:
                elsewhere.append(call)
                continue
            scores, error, spent = _answer(scoring.rewards(call), scoring.of(call))
            self._timed(call, spent)
            if error is None:
                scoring.answered(call, scores)
            else:
                scoring.failed(call, error)
        scoring.waiting.extend(elsewhere)

    def _timed(self, call: Call, seconds: float) -> None:
        self.seconds.extend([seconds / len(call.places)] * len(call.places))

    def _grow(self, calls: int) -> None:
        while len(self._children) < min(self._workers, calls):
            self._children.append(self._start())

    def _start(self) -> Child:
        if self._closed:
            raise RewardError("scores were asked of a reward pool that is closed")
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve,
            args=(theirs, self.reward, self.config, self._workers, str(self.log), str(self._scratch)),
        )
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # a user's script is not to run again in the child
        try:
            process.start()
        finally:
            sys.modules["__main__"] = main
        theirs.close()
        return Child(process, ours, time.monotonic() + START_SECONDS)

    def _feed(self, scoring: Scoring) -> None:
        """Sends calls to the processes that have none; one that died idle is replaced first."""
        for place, child in enumerate(self._children):
            if child.ready and not child.calls and not child.process.is_alive():
                child.kill()
                self.counts["died"] += 1
                self._children[place] = self._start()
            elif scoring.waiting and child.ready and not child.calls:
                share = max(1, min(CHUNK, len(scoring.waiting) // (2 * len(self._children))))
                child.calls.extend(scoring.waiting.popleft() for _ in range(share))
                child.deadline = time.monotonic() + self.config.timeout
                try:
                    child.pipe.send([(call.own, call.parts, scoring.of(call)) for call in child.calls])
                except BrokenPipeError:  # it died just now, and is heard of next
                    continue

    def _listen(self, scoring: Scoring) -> None:
        """Takes what the processes say until the next deadline, and replaces those that failed."""
        busy = [child for child in self._children if child.calls or not child.ready]
        until = min([child.deadline for child in busy] + [self._heard + SLOW_SECONDS])
        ends = [each for child in busy for each in (child.pipe, child.process.sentinel)]
        wait(ends, max(0.0, until - time.monotonic()))
        for child in busy:
            dead = not child.process.is_alive()  # before its last words are read
            problem = self._hear(child, scoring)
            if not problem and (child.calls or not child.ready):
                late = time.monotonic() > child.deadline
                problem = "died" if dead else "timeouts" if late else ""
            if problem:
                self._replace(child, problem, scoring)
        if time.monotonic() > self._heard + SLOW_SECONDS:
            self._say_slow(scoring)

    def _hear(self, child: Child, scoring: Scoring) -> str:
        """Takes a process' answers; tells why it must be replaced, if it must."""
        try:
            while child.pipe.poll():
                answer = child.pipe.recv()
                self._heard = time.monotonic()
                if not child.ready:
                    child.ready = True
                    continue
                scores, error, spent, grown = answer
                call = child.calls.popleft()
                self._timed(call, spent)
                child.deadline = time.monotonic() + self.config.timeout
                if error is None:
                    scoring.answered(call, scores)
                else:
                    scoring.failed(call, error)
                if grown:
                    return "recycled"
        except (EOFError, OSError):
            return "died"
        return ""

    def _replace(self, child: Child, problem: str, scoring: Scoring) -> None:
        """Starts another process for one that hangs, died or has grown; a call that it was at has failed."""
        self.counts[problem] += 1
        child.kill()
        if not child.ready:
            raise RewardError("a scoring process did not start", got=f"see {self.log}")
        if problem != "recycled" and child.calls:
            call = child.calls.popleft()
            ended = f"ended its process with exit code {child.process.exitcode}"
            told = f"took more than {self.config.timeout:g} s and was ended"
            place = call.places[0]
            if problem == "timeouts":
                self._timed(call, self.config.timeout)
            error = call.reward.error(told if problem == "timeouts" else ended, place, scoring.items[place])
            error.remedy = f"{error.remedy}; {LONGER}" if problem == "timeouts" else error.remedy
            scoring.failed(call, error)
        scoring.waiting.extendleft(reversed(child.calls))
        self._children[self._children.index(child)] = self._start()

    def _say_slow(self, scoring: Scoring) -> None:
        self._heard = time.monotonic() + self.config.timeout  # once for each silence
        for call in [child.calls[0] for child in self._children if child.calls][:1]:
            item = scoring.items[call.places[0]]
            self._say(
                f"the reward function {call.reward.name} has not answered for {SLOW_SECONDS:g} s "
                f"(data_source '{item.data_source}', row {item.index}); each call is ended after "
                f"{self.config.timeout:g} s (reward.timeout)"
            )


def score(items: Sequence[Item], own: Scorer | None = None) -> list[Scored]:
    """Scores of all items, in their order, by calls in this process.

    Args:
        items: responses; their sources may differ.
        own: the user's own reward; None takes each data source's.

    Raises:
        RewardError: a data source without a reward; a function that raised or returned anything but a
            finite number (or a dict of one); names the function and the sample.
    """
    return Pool(own, RewardConfig(num_workers=0)).score(items)


def _end(children: list[Child]) -> None:
    while children:
        children.pop().kill()


def _serve(
    pipe: Connection, own: Scorer | None, config: RewardConfig, processes: int, log: str, scratch: str
) -> None:
    """Scores what the pipe brings, in a process of the pool, until the pipe ends."""
    os.setsid()
    tempfile.tempdir = scratch
    place_programs(config.sandbox, processes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None
    # The kernel ends this process and what it started when the parent's end closes, whatever runs here.
    alive = int(parent.sentinel)
    fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    before = None  # what the first call loads and keeps is no growth
    pipe.send("ready")
    try:
        while True:
            for by_user, parts, items in pipe.recv():
                scorer = own if by_user and own else reward_for(next(iter(items.values())).data_source)
                scores, error, spent = _answer([scorer.parts[part] for part in parts], items)
                if error is not None:
                    error.__cause__ = None  # another process might not know what the function raised
                resident = _resident_megabytes()
                before = resident if before is None else before
                grown = config.max_growth_mb is not None and resident - before > config.max_growth_mb
                pipe.send((scores, error, spent, grown))
    except (EOFError, BrokenPipeError):
        return


def _answer(
    rewards: Sequence[Reward], items: Mapping[int, Item]
) -> tuple[Sequence[Mapping[int, Scored | None]], RewardError | None, float]:
    """The scores, or the error, and the seconds that it took."""
    began = time.perf_counter()
    try:
        return scores_of(rewards, items), None, time.perf_counter() - began
    except RewardError as error:
        return [], error, time.perf_counter() - began


def _resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 2**20
