"""The program of a scoring process, which calls reward functions, and the format of its answers.

The trainer sends calls as pickles. An answer is JSON after a header. The header has the number of the call,
the id of the process, a secret token of this process, and the length of the answer. So if a reward function,
or a fork of the process, writes to the socket, its output is never mistaken for an answer.
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
from tandem.rewards.calling import describe_error
from tandem.rewards.items import Item, Scored
from tandem.rewards.programs import place_programs
from tandem.texts import parse_json

ANSWER_BYTES = 64 * 2**20  # the largest answer
ERROR_CHARACTERS = 4000  # how many characters of each part of an error are sent
TOKEN_BYTES = 16
READ_BYTES = 2**20
_HEAD = struct.Struct(f"!{TOKEN_BYTES}sQQQ")
_PARTS = ("message", "field", "got", "expected", "remedy")


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a scoring process, with its settings.

    Attributes:
        token: The token that each answer must contain.
        reward: The user's reward, pickled. Unpickling it runs the user's code.
        config: The section `reward` of the config.
        processes: The number of processes in the pool.
        scratch: The folder for temporary files.
        path: The folders to import modules from (`sys.path`).
        folder: The working directory.
        environment: The environment variables.
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
    """The result of a call.

    Attributes:
        number: The number of the call; 0 reports the start of the process.
        scores: For each function, a dict from row number to score; empty if there is an error.
        error: The reason for a failure; None without a failure.
        seconds: The duration of the call; 0 if unknown.
        grown: Whether the process has grown so much that it must be replaced.
        keeper: The process id of the keeper; set only in the answer that reports the start.
    """

    number: int
    scores: list[dict[int, Scored | None]] = field(default_factory=list)
    error: RewardError | None = None
    seconds: float = 0.0
    grown: bool = False
    keeper: int = 0


class Garbled(Exception):
    """Raised if the data on the socket is not a valid answer."""


def send(line: socket.socket, value: Any, seconds: float) -> None:
    """Send a message, and set the socket to non-blocking mode.

    Args:
        line: The socket.
        value: The message, which is pickled.
        seconds: The time limit.

    Raises:
        OSError: The other end is closed, or does not read the message within the time limit.
    """
    line.settimeout(seconds)
    try:
        line.sendall(pickle.dumps(value))
    finally:
        line.setblocking(False)


class Inbox:
    """The reader of the answers on a socket.

    Args:
        token: The token that answers must contain.
    """

    def __init__(self, token: bytes) -> None:
        self._token, self._held = token, bytearray()
        self.pid = 0

    def read(self, line: socket.socket) -> Iterator[Answer]:
        """Yield all complete answers that have arrived.

        Args:
            line: The socket.

        Raises:
            Garbled: The data is not a valid answer.
            EOFError: The other end is closed.
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
    """Encode an answer; if it is too long, encode an error message instead."""
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
    """Make a call and return its result: the scores, or the reason for its failure."""
    began = time.perf_counter()
    try:
        result = Answer(number, scores_of(rewards, items))
    except RewardError as error:
        result = Answer(number, error=error)
    return replace(result, seconds=time.perf_counter() - began)


def serve(line: socket.socket, calls: mmap.mmap) -> None:
    """Make the calls that arrive on a socket, until its other end closes.

    Args:
        line: The socket.
        calls: Shared memory for the number of the current call, which the keeper reads.
    """
    os.register_at_fork(after_in_child=line.close)  # forked copies of this process must not send answers
    questions = open(line.fileno(), "rb", closefd=False)  # noqa: SIM115  until this process ends
    setup: Setup = pickle.load(questions)
    process, keeper = _ServingProcess(line, setup), os.getppid()
    try:
        reward = pickle.loads(setup.reward)
    except BaseException as error:
        traceback.print_exc()
        failed = (
            error
            if isinstance(error, RewardError)
            else RewardError(f"loading the reward {describe_error(error)}")
        )
        process.say(Answer(0, error=failed))
        return
    process.say(Answer(0, keeper=keeper))
    with suppress(EOFError):
        while True:
            for number, parts, packed in pickle.load(questions):
                items = pickle.loads(packed)  # a fresh copy for each call, because a function may change it
                scorer = reward or reward_for(next(iter(items.values())).data_source)
                calls[:] = number.to_bytes(len(calls))
                process.call(number, [scorer.parts[part] for part in parts], items)


class _ServingProcess:
    """The state of a scoring process, set up from the first message."""

    def __init__(self, line: socket.socket, setup: Setup) -> None:
        self._line, self._token, self._most = line, setup.token, setup.config.max_growth_mb
        self.pid, self._before = os.getpid(), -1.0  # memory that the first call loads and keeps is not growth
        os.environ.clear()
        os.environ.update(setup.environment)
        sys.path[:] = setup.path
        os.chdir(setup.folder)
        self._scratch = f"{setup.scratch}/{self.pid}"
        tempfile.tempdir = self._scratch
        place_programs(setup.config.sandbox, setup.processes)
        for number, name in ((1, "stdout"), (2, "stderr")):  # the server's own streams lead elsewhere
            stream = open(  # noqa: SIM115
                number, "w", encoding="utf-8", buffering=1, errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)
        os.makedirs(self._scratch, exist_ok=True)

    def call(self, number: int, rewards: Sequence[Reward], items: Mapping[int, Item]) -> None:
        """Make a call and send its result."""
        if not os.path.isdir(self._scratch):  # a function has removed it
            os.makedirs(self._scratch)
        try:
            result = answer(number, rewards, items)
        except BaseException as raised:  # this process gets no Ctrl-C, so the function raised it
            place, item = next(iter(items.items()))
            result = Answer(number, error=rewards[0].error(describe_error(raised), place, item))
        with open("/proc/self/statm", "rb") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize() / 2**20  # in MiB
        self._before = resident if self._before < 0 else self._before
        grown = self._most is not None and resident - self._before > self._most
        self.say(replace(result, grown=grown))

    def say(self, result: Answer) -> None:
        """Send an answer; if this process is a copy that a function forked, end it instead."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a function may have closed it
                stream.flush()
        if os.getpid() != self.pid:
            os._exit(0)
        text = _text_of(result)
        self._line.sendall(_HEAD.pack(self._token, result.number, self.pid, len(text)) + text)
