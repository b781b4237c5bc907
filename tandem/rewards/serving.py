"""The process that calls reward functions, and what it says: answers that another process can check.

Questions come as pickles, which the trainer writes. An answer is plain JSON behind a header with the number
of its call, the process that made it, a word that was given to that process alone, and its length. So what a
function writes into the pipe itself, or a copy of the process that it made, is never taken for an answer.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import resource
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from tandem.config.rewards import RewardConfig
from tandem.errors import RewardError
from tandem.rewards.base import Reward, reward_for, scores_of
from tandem.rewards.calling import told
from tandem.rewards.items import Item, Scored
from tandem.rewards.programs import place_programs
from tandem.texts import parse_json

ANSWER_BYTES = 64 * 2**20  # the longest answer
ERROR_CHARACTERS = 4000  # how much of each part of an error is told
TOKEN_BYTES = 16
READ_BYTES = 2**20
_HEAD = struct.Struct(f"!{TOKEN_BYTES}sQQQ")
_PARTS = ("message", "field", "got", "expected", "remedy")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process is told first.

    Attributes:
        token: the word that its answers bear.
        reward: the user's own, pickled; loading it runs the user's code.
        config: of the calls.
        processes: of the pool.
        scratch: the folder for temporary files.
        path: where modules are found.
        folder: the working directory.
        environment: the variables.
    """

    token: bytes
    reward: bytes
    config: RewardConfig
    processes: int
    scratch: str
    path: list[str]
    folder: str
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call.

    Attributes:
        number: of the call; 0: that it has started.
        scores: by each function, by place; none where there is an error.
        error: why it failed.
        seconds: that it took; 0 where nobody knows.
        grown: whether the process is to be replaced.
        keeper: the process that keeps it, as it was when it started.
    """

    number: int
    scores: list[dict[int, Scored | None]] = field(default_factory=list)
    error: RewardError | None = None
    seconds: float = 0.0
    grown: bool = False
    keeper: int = 0


class Garbled(Exception):
    """Something else came than an answer."""


def send(line: socket.socket, value: Any, seconds: float) -> None:
    """Send a question; reading the line never waits.

    Raises:
        OSError: the line is closed, or takes no more in its time.
    """
    line.settimeout(seconds)
    try:
        line.sendall(pickle.dumps(value))
    finally:
        line.setblocking(False)


class Inbox:
    """The answers that come on a line, as far as they are there.

    Args:
        token: the word that they bear.
    """

    def __init__(self, token: bytes) -> None:
        self._token, self._held = token, bytearray()
        self.pid = 0

    def read(self, line: socket.socket) -> Iterator[Answer]:
        """Yield the answers that are whole.

        Raises:
            Garbled: something else came.
            EOFError: the other end is closed.
        """
        with suppress(BlockingIOError):
            part = line.recv(READ_BYTES)
            if not part:
                raise EOFError
            self._held += part
        while len(self._held) >= _HEAD.size:
            token, number, pid, length = _HEAD.unpack_from(self._held)
            self.pid = self.pid or pid
            if (token, pid) != (self._token, self.pid) or length > ANSWER_BYTES:
                raise Garbled
            if len(self._held) < _HEAD.size + length:
                return
            text = bytes(self._held[_HEAD.size : _HEAD.size + length])
            del self._held[: _HEAD.size + length]
            yield _answer_of(number, text)


def _answer_of(number: int, text: bytes) -> Answer:
    try:
        scores, error, seconds, grown, keeper = parse_json(text)
        found = [
            {int(place): None if scored is None else Scored(*scored) for place, scored in part.items()}
            for part in scores
        ]
        failed = None if error is None else RewardError(error.pop("message"), **error)
        return Answer(number, found, failed, float(seconds), bool(grown), int(keeper))
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise Garbled from problem


def _text_of(answer: Answer) -> bytes:
    """Return the text of an answer, or that of an error in its place if it is too long."""
    error = answer.error
    plain = None if error is None else {name: _cut(getattr(error, name)) for name in _PARTS}
    scores = [
        {place: None if scored is None else astuple(scored) for place, scored in part.items()}
        for part in answer.scores
    ]
    told_of = (scores, plain, answer.seconds, answer.grown, answer.keeper)
    text = json.dumps(told_of, separators=(",", ":")).encode()
    if len(text) <= ANSWER_BYTES:
        return text
    long = RewardError(
        "the answer of a reward function is too long",
        got=f"{len(text)} bytes",
        expected=f"at most {ANSWER_BYTES}",
    )
    return _text_of(Answer(answer.number, [], long, answer.seconds, answer.grown))


def _cut(part: Any) -> str | None:
    return None if part is None else str(part)[:ERROR_CHARACTERS]


def answer(number: int, rewards: Sequence[Reward], items: Mapping[int, Item]) -> Answer:
    """Return what comes of a call: its scores, or why it failed."""
    began = time.perf_counter()
    try:
        said = Answer(number, scores_of(rewards, items))
    except RewardError as error:
        said = Answer(number, error=error)
    return replace(said, seconds=time.perf_counter() - began)


def serve(line: socket.socket, calls: mmap.mmap) -> None:
    """Answer what comes on a line until it ends.

    Args:
        calls: tells the keeper that another call begins.
    """
    os.register_at_fork(after_in_child=line.close)  # copies of this process have nothing to say
    questions = open(line.fileno(), "rb", closefd=False)  # noqa: SIM115  until this process ends
    setup: Setup = pickle.load(questions)
    own, keeper = _Own(line, setup), os.getppid()
    try:
        reward = pickle.loads(setup.reward)
    except BaseException as error:
        traceback.print_exc()
        failed = error if isinstance(error, RewardError) else RewardError(f"loading the reward {told(error)}")
        own.say(Answer(0, error=failed))
        return
    own.say(Answer(0, keeper=keeper))
    with suppress(EOFError):
        while True:
            for number, parts, packed in pickle.load(questions):
                items = pickle.loads(packed)  # each call has its own: a function may change them
                scorer = reward or reward_for(next(iter(items.values())).data_source)
                calls[:] = number.to_bytes(len(calls))
                own.call(number, [scorer.parts[part] for part in parts], items)


class _Own:
    """This process, as it was set up."""

    def __init__(self, line: socket.socket, setup: Setup) -> None:
        self._line, self._token, self._most = line, setup.token, setup.config.max_growth_mb
        self.pid, self._before = os.getpid(), -1.0  # what the first call loads and keeps is no growth
        os.environ.clear()
        os.environ.update(setup.environment)
        sys.path[:] = setup.path
        os.chdir(setup.folder)
        self._scratch = f"{setup.scratch}/{self.pid}"
        tempfile.tempdir = self._scratch
        place_programs(setup.config.sandbox, setup.processes)
        for number, name in ((1, "stdout"), (2, "stderr")):  # those of the server go elsewhere
            stream = open(  # noqa: SIM115
                number, "w", encoding="utf-8", buffering=1, errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)
        os.makedirs(self._scratch, exist_ok=True)

    def call(self, number: int, rewards: Sequence[Reward], items: Mapping[int, Item]) -> None:
        """Make a call, and say what came of it."""
        if not os.path.isdir(self._scratch):  # a function has removed it
            os.makedirs(self._scratch)
        try:
            said = answer(number, rewards, items)
        except BaseException as raised:  # no key of a terminal reaches this process: it is the function's own
            place, item = next(iter(items.items()))
            said = Answer(number, error=rewards[0].error(told(raised), place, item))
        with open("/proc/self/statm", "rb") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize() / 2**20  # in MiB
        self._before = resident if self._before < 0 else self._before
        grown = self._most is not None and resident - self._before > self._most
        self.say(replace(said, grown=grown))

    def say(self, said: Answer) -> None:
        """Send an answer; a copy that a function made of this process ends instead."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a function may have closed it
                stream.flush()
        if os.getpid() != self.pid:
            os._exit(0)
        text = _text_of(said)
        self._line.sendall(_HEAD.pack(self._token, said.number, self.pid, len(text)) + text)
