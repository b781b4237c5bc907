"""Tasks of reasoning-gym (optional extra `tasks`): generated problems, and scores of answers to them.

A task can replace a data file: `reasoning-gym:NAME?size=5000&seed=1&KEY=VALUE`. `size` (500), `seed` (0) and
the other parameters are parameters of the generator. `answer` sets the location of the answer in a response:
with `tags` (the default), prompts ask for the answer between <answer> and </answer>; with `text`, the whole
response is the answer. Source: https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import difflib
import functools
import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl

from tandem.errors import DataError
from tandem.texts import parse_json

PREFIX = "reasoning-gym:"
ASKED_FOR_TAGS = "\nGive the answer between <answer> and </answer>."
SIZE = 500


@dataclass(frozen=True, slots=True)
class GymTask:
    """A generator of reasoning-gym with its parameters.

    Attributes:
        reference: the reference as the user wrote it.
        name: name of the generator.
        parameters: parameters of the generator.
        tags: whether the answer is between tags.
    """

    reference: str
    name: str
    parameters: dict[str, Any]
    tags: bool

    @property
    def size(self) -> int:
        return int(self.parameters.get("size", SIZE))

    def rows(self) -> list[dict[str, Any]]:
        """Return all problems, as rows for `tandem train`.

        Raises:
            DataError: reasoning-gym is not installed, lacks the generator, or refuses the parameters.
        """
        problems = generator(self.reference)
        asked = ASKED_FOR_TAGS if self.tags else ""
        return [
            {
                "data_source": f"{PREFIX}{self.name}",
                "prompt": [{"role": "user", "content": f"{problem['question']}{asked}"}],
                "ability": "reasoning",
                "reward_model": {"style": "rule", "ground_truth": str(problem["answer"])},
                "extra_info": {"task": self.reference, "index": index},
            }
            for index, problem in enumerate(problems)
        ]

    def answer(self, response: str) -> str | None:
        """Return the answer of a response: the text in its last pair of tags, or the whole response."""
        if not self.tags:
            return response.strip()
        _, opened, rest = response.rpartition("<answer>")
        found, closed, _ = rest.partition("</answer>")
        return found.strip() if opened and closed else None

    def score(self, answer: str | None, index: int) -> float:
        """Return reasoning-gym's score of an answer to a problem, from 0 to 1."""
        return float(generator(self.reference).score_answer(answer, _problem(self.reference, index)))


def is_task(file: str) -> bool:
    """Return whether a data file is the name of a task."""
    return file.startswith(PREFIX)


@functools.lru_cache(maxsize=1024)
def parse(reference: str) -> GymTask:
    """Return the task of a reference.

    Raises:
        DataError: the reference cannot be parsed, or reasoning-gym is not installed.
    """
    name, _, query = reference.removeprefix(PREFIX).partition("?")
    try:
        given = {key: _value(text) for key, text in parse_qsl(query, strict_parsing=bool(query))}
    except ValueError as error:
        raise _wrong(reference, str(error)) from error
    place = given.pop("answer", "tags")
    if not name or place not in ("tags", "text"):
        raise _wrong(reference, "no name" if not name else f"answer={place}")
    if not isinstance(given.get("size", SIZE), int) or given.get("size", SIZE) < 1:
        raise _wrong(reference, f"size={given['size']}")
    if find_spec("reasoning_gym") is None:
        raise DataError(
            "reasoning-gym is not installed", field=reference, remedy="pip install 'tandem[tasks]'"
        )
    return GymTask(reference, name, given, place == "tags")


@functools.lru_cache(maxsize=64)
def generator(reference: str) -> Any:
    """Return reasoning-gym's dataset for a reference.

    Raises:
        DataError: reasoning-gym is not installed, lacks the generator, or refuses the parameters.
    """
    task = parse(reference)
    names = _library("reasoning_gym.factory").DATASETS
    if task.name not in names:
        close = difflib.get_close_matches(task.name, names, n=1)
        raise DataError(
            "reasoning-gym has no such task",
            field=reference,
            got=task.name,
            expected=f"one of {', '.join(sorted(names))}",
            remedy=f"{PREFIX}{close[0]}" if close else None,
        )
    try:
        return _library("reasoning_gym").create_dataset(
            task.name, **{"size": SIZE, "seed": 0, **task.parameters}
        )
    except (AssertionError, TypeError, ValueError) as error:
        raise _wrong(reference, f"{type(error).__name__}: {error}") from error


def _library(name: str) -> Any:
    """Import a module of reasoning-gym, without Python's warnings about packages that it needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return import_module(name)


@functools.lru_cache(maxsize=4096)
def _problem(reference: str, index: int) -> Any:
    return generator(reference)[index]


def _value(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text


def _wrong(reference: str, problem: str) -> DataError:
    return DataError(
        "this is not a task",
        field=reference,
        got=problem,
        expected=f"{PREFIX}NAME?size=N&seed=N&KEY=VALUE&answer=tags|text, with keys of the generator",
        remedy="quote the reference for the shell, and write lists as JSON",
    )
