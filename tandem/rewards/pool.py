"""A pool of processes that score responses.

If a call hangs or its process dies, only the samples of this call are affected. A process whose memory grows
is replaced.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from tandem.config.rewards import RewardConfig
from tandem.errors import RewardError
from tandem.lifetime import make_scratch, remove_scratch
from tandem.rewards import forkserver
from tandem.rewards.base import Scorer
from tandem.rewards.calling import SLOW_SECONDS, load_seconds
from tandem.rewards.items import Item, Scored
from tandem.rewards.programs import place_programs
from tandem.rewards.scoring import BatchScores, RewardCall
from tandem.rewards.serving import TOKEN_BYTES, Answer, Garbled, Inbox, Setup, answer, send

SEND_SECONDS = 10.0  # how long an idle process may take to read calls
CLOSE_SECONDS = 10.0  # how long a scoring thread may take to notice that the pool is closed
CHUNK = 16  # the most calls that are sent to a process at a time
NEWEST = 4096  # the number of samples whose scoring times are kept
TIMEOUT_REMEDY = "raise reward.timeout, or set reward.on_error=zero or drop to continue without failed scores"


@dataclass(slots=True, eq=False)
class Child:
    """A process of the pool, with the calls that were sent to it and are not answered yet.

    Attributes:
        line: The socket for calls and their answers.
        keeper: The socket to the keeper, which closes when the process and all its descendants have ended.
        inbox: The reader of the answers on `line`.
        deadline: The time limit of the process's start, and later of its first unanswered call.
        calls: The unanswered calls, keyed by number.
        ready: Whether the process has started.
        kept_by: The process id of the keeper; 0 before the process has started.
    """

    line: socket.socket
    keeper: socket.socket
    inbox: Inbox
    deadline: float
    calls: deque[tuple[int, RewardCall]] = field(default_factory=deque)
    ready: bool = False
    kept_by: int = 0

    def signal(self) -> None:
        """Tell the keeper to kill the process and all its descendants."""
        with suppress(OSError):  # the keeper has ended already
            self.keeper.shutdown(socket.SHUT_WR)

    def kill(self) -> str:
        """Kill the process and all its descendants; return a description of its exit code."""
        self.signal()
        code = b""
        try:
            self.keeper.settimeout(2 * forkserver.END_SECONDS)
            while part := self.keeper.recv(64):
                code += part
        except TimeoutError:  # a function has stopped the keeper; the server ends what remains
            if self.kept_by:
                with suppress(ProcessLookupError):
                    os.kill(self.kept_by, signal.SIGKILL)
        except OSError:  # the keeper had ended already
            pass
        self.keeper.close()
        self.line.close()
        return code.decode() or str(-signal.SIGKILL)


class Pool:
    """A pool of processes that call reward functions.

    Functions with `bounded` are called in this process. With `reward.num_workers=0`, all functions are called
    in this process.

    Asynchronous calls that wait at the same time share one time limit. If one of these calls fails, each of
    them is repeated separately.

    Args:
        reward: The user's reward; None: the built-in reward of each data source.
        config: The section `reward` of the config.
        log: The file for the output of functions.
        say: Prints a sentence for the user about slow calls.

    Attributes:
        counts: The numbers of "failed", "retried", "timeouts", "died" and "recycled" since the counts were
            last cleared.
        failures: The failures of the last batch, keyed by row number.
        seconds: The scoring times of the newest samples. If a call scores several samples, each gets an equal
            share.
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
        place_programs(config.sandbox, self._workers)  # for calls in this process
        self._say = say
        self._scoring = threading.Lock()
        self._closed = False
        self._children: list[Child] = []
        self._numbers = itertools.count(1)
        self._scratch = make_scratch("rewards")  # here, because processes may be killed before they clean up
        weakref.finalize(self, remove_scratch, self._scratch)
        weakref.finalize(self, _end, self._children)  # at exit, the last finalizer runs first

    def score(self, items: Sequence[Item]) -> list[Scored]:
        """Return the scores of all items, in their order.

        Args:
            items: The responses to score.

        Raises:
            RewardError: A call failed and `reward.on_error` is raise; a data source has no reward; or another
                thread closed the pool.
        """
        scoring = BatchScores(items, self.reward, self.config)
        with self._scoring:
            try:
                self._call_here(scoring)
                while len(self._children) < min(self._workers, len(scoring.waiting)):
                    self._children.append(self._start())
                self._heard = time.monotonic()
                while not scoring.done:
                    self._feed(scoring)
                    self._listen(scoring)
            except BaseException:
                _end(self._children)  # answers to calls in progress would arrive in the next batch
                raise
            finally:
                self.failures = scoring.failures
        scores = scoring.scores()
        self.counts += scoring.counts
        return scores

    def close(self) -> None:
        """Stop all processes, and abort a batch that another thread is scoring."""
        self._closed = True
        for child in list(self._children):
            child.signal()
        # The scoring thread notices that they ended. A thread that calls functions itself has none.
        if self._scoring.acquire(timeout=CLOSE_SECONDS if self._children else 0):
            _end(self._children)
            self._scoring.release()

    def _call_here(self, scoring: BatchScores) -> None:
        elsewhere = deque[RewardCall]()
        while scoring.waiting:
            call = scoring.waiting.popleft()
            if self._workers and not call.reward.bounded:
                elsewhere.append(call)
                continue
            items = scoring.of(call)
            if not call.reward.bounded:  # a user's function may change its arguments
                items = copy.deepcopy(items)
            self._take(scoring, call, answer(0, scoring.rewards(call), items))
        scoring.waiting.extend(elsewhere)

    def _take(self, scoring: BatchScores, call: RewardCall, result: Answer) -> None:
        if result.seconds:
            self.seconds.extend([result.seconds / len(call.places)] * len(call.places))
        scoring.take(call, result)

    def _start(self) -> Child:
        if self._closed:
            raise RewardError("the reward pool is closed and cannot score")
        setup = Setup(
            token=os.urandom(TOKEN_BYTES),
            reward=pickle.dumps(self.reward),
            config=self.config,
            processes=self._workers,
            scratch=str(self._scratch),
            path=sys.path,
            folder=os.getcwd(),
            environment=dict(os.environ),
        )
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            forkserver.fork([*(end.fileno() for end in theirs), log])
        finally:
            os.close(log)
            for end in theirs:
                end.close()
        limit = load_seconds(self.config.timeout)
        for end in ours:
            end.setblocking(False)
        child = Child(*ours, Inbox(setup.token), time.monotonic() + limit)
        with suppress(OSError):  # the process has ended, which is noticed later
            send(child.line, setup, limit)
        return child

    def _feed(self, scoring: BatchScores) -> None:
        """Send calls to idle processes; first replace an idle process that died or wrote something."""
        for place, child in enumerate(self._children):
            idle = child.ready and not child.calls
            if idle and wait([child.line, child.keeper], 0):
                child.kill()
                self.counts["died"] += 1
                self._children[place] = self._start()
            elif idle and scoring.waiting:
                share = max(1, min(CHUNK, len(scoring.waiting) // (2 * len(self._children))))
                calls = [scoring.waiting.popleft() for _ in range(share)]
                child.calls.extend(zip(self._numbers, calls, strict=False))
                child.deadline = time.monotonic() + self.config.timeout
                with suppress(OSError):  # the process has just died or stopped, which is noticed later
                    asked = [(n, c.parts, pickle.dumps(scoring.of(c))) for n, c in child.calls]
                    send(child.line, asked, SEND_SECONDS)

    def _listen(self, scoring: BatchScores) -> None:
        """Receive answers until the next deadline, and replace processes that failed."""
        busy = [child for child in self._children if child.calls or not child.ready]
        until = min([child.deadline for child in busy] + [self._heard + SLOW_SECONDS])
        ends = [each for child in busy for each in (child.line, child.keeper)]
        ready = wait(ends, max(0.0, until - time.monotonic()))
        for child in busy:
            dead = child.keeper in ready  # all answers of a dead process have arrived by then
            problem = self._hear(child, scoring) if child.line in ready else ""
            if not problem and (child.calls or not child.ready):
                late = time.monotonic() > child.deadline
                problem = "died" if dead else "timeouts" if late else ""
            if problem:
                self._replace(child, problem, scoring)
        if time.monotonic() > self._heard + SLOW_SECONDS:
            self._say_slow(scoring)

    def _hear(self, child: Child, scoring: BatchScores) -> str:
        """Receive the answers of a process; return the reason to replace the process, or ""."""
        try:
            for result in child.inbox.read(child.line):
                self._heard = time.monotonic()
                if not child.ready and result.number == 0:
                    if result.error is not None:
                        raise result.error
                    child.ready, child.kept_by = True, result.keeper
                elif child.calls and child.calls[0][0] == result.number:
                    _, call = child.calls.popleft()
                    child.deadline = time.monotonic() + self.config.timeout
                    self._take(scoring, call, result)
                    if result.grown:
                        return "recycled"
                else:
                    return "garbled"
        except Garbled:
            return "garbled"
        except (EOFError, OSError):
            return "died"
        return ""

    def _replace(self, child: Child, problem: str, scoring: BatchScores) -> None:
        """Replace a process that hangs, died or has grown too much; its current call has failed.

        Args:
            child: The process.
            problem: The reason to replace the process.
            scoring: The batch.

        Raises:
            RewardError: The process did not start; or its call failed and `reward.on_error` is raise.
        """
        self.counts["died" if problem == "garbled" else problem] += 1
        code, late, limit = child.kill(), problem == "timeouts", self.config.timeout
        if not child.ready:
            raise RewardError(
                "a scoring process did not start",
                field="custom_reward_function.path",
                got=f"loading the reward took more than {load_seconds(limit):g} s"
                if late
                else f"exit code {code}; see {self.log}",
                remedy="raise reward.timeout, or let the file load what it needs at the first call"
                if late
                else "fix what the file does on import",
            )
        if problem != "recycled" and child.calls:
            words = {
                "timeouts": f"took more than {limit:g} s and was stopped",
                "died": f"ended its process with exit code {code}, or closed the pipe for its answers",
                "garbled": "wrote to the pipe for answers, which it must not use",
            }
            _, call = child.calls.popleft()
            place = call.places[0]
            error = call.reward.error(words[problem], place, scoring.items[place])
            if late:
                error.remedy = f"{error.remedy}; {TIMEOUT_REMEDY}"
            self._take(scoring, call, Answer(0, error=error, seconds=limit if late else 0.0))
        scoring.waiting.extendleft(call for _, call in reversed(child.calls))
        self._children[self._children.index(child)] = self._start()

    def _say_slow(self, scoring: BatchScores) -> None:
        self._heard = time.monotonic() + self.config.timeout  # one message for each silence
        for _, call in [child.calls[0] for child in self._children if child.calls][:1]:
            item = scoring.items[call.places[0]]
            self._say(
                f"the reward function {call.reward.name} has not answered for {SLOW_SECONDS:g} s "
                f"(data_source '{item.data_source}', row {item.index}); each call is stopped after "
                f"{self.config.timeout:g} s (reward.timeout)"
            )


def score(items: Sequence[Item], own: Scorer | None = None) -> list[Scored]:
    """Return the scores of all items, in their order, with calls in this process.

    Args:
        items: The responses to score; their data sources may differ.
        own: The user's reward; None: the built-in reward of each data source.

    Raises:
        RewardError: A data source has no reward; or a function raised an exception; or a function did not
            return a finite number or a dict with a finite "score". The error names the function and the
            sample.
    """
    return Pool(own, RewardConfig(num_workers=0)).score(items)


def _end(children: list[Child]) -> None:
    for child in children:
        child.signal()
    while children:
        children.pop().kill()
