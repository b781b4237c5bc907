"""Additions of two-digit numbers: problems, imperfect demonstrations, and functions that write them.

An answer shows its working, column by column from the right, then the sum after "=": 37+65 is "12,10=102".
Most demonstrations forget to carry: "12,9=92". A model that imitates them solves the third of the problems
that have no carry, and few of the other problems. All further gains come from reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet

DATA_SOURCE = "arithmetic"
LARGEST = 99
SMALLEST = 10
LONGEST_PROMPT = len("99+99?")
LONGEST_RESPONSE = len("18,19=198") + 1
"""The length of the longest answer in tokens: one per character, plus the end token."""


class Problem(NamedTuple):
    """The addition of two two-digit numbers."""

    first: int
    second: int

    @property
    def question(self) -> str:
        return f"{self.first}+{self.second}?"

    @property
    def answer(self) -> str:
        return str(self.first + self.second)

    @property
    def carries(self) -> bool:
        """Whether the units add up to ten or more."""
        return self.first % 10 + self.second % 10 > 9

    def working(self, *, forget_carry: bool = False) -> str:
        """Return a worked answer: the sum of the units, the sum of the tens with carry, and the result."""
        units = self.first % 10 + self.second % 10
        carry = 0 if forget_carry else units // 10
        tens = self.first // 10 + self.second // 10 + carry
        return f"{units},{tens}={tens}{units % 10}"


@dataclass(frozen=True, slots=True)
class Split:
    """Problems for training, and problems for validation."""

    train: list[Problem]
    validation: list[Problem]


def split(*, seed: int, train: int, validation: int) -> Split:
    """Draw different problems, two thirds of which have a carry.

    No validation problem occurs in training, not even with swapped numbers.

    Args:
        seed: seed of the draw.
        train: number of training problems.
        validation: number of validation problems.

    Raises:
        ValueError: there are not enough problems.
    """
    rng = np.random.default_rng([seed, 0])
    numbers = range(SMALLEST, LARGEST + 1)
    every = [Problem(first, second) for first in numbers for second in numbers]
    pool = [every[place] for place in rng.permutation(len(every))]
    examined = _draw(pool, validation)
    known = {frozenset(problem) for problem in examined}
    return Split(_draw([problem for problem in pool if frozenset(problem) not in known], train), examined)


def _draw(pool: Sequence[Problem], count: int) -> list[Problem]:
    """Return the first problems of the pool, with the repeated pattern: carry, carry, no carry."""
    kinds = {carries: iter([p for p in pool if p.carries is carries]) for carries in (True, False)}
    drawn = [next(kinds[place % 3 < 2], None) for place in range(count)]
    found = [problem for problem in drawn if problem is not None]
    if len(found) < count:
        raise ValueError(
            f"only {len(found)} of {count} problems can be drawn if two of three must have a carry"
        )
    return found


def demonstrations(
    problems: Sequence[Problem], *, seed: int, count: int, forget_carry: float
) -> list[tuple[Problem, str]]:
    """Return problems with worked answers for supervised fine-tuning. Some of the answers are wrong.

    Args:
        problems: the problems. Their counts in the result differ by at most one.
        seed: seed of the order and of the mistakes.
        count: number of demonstrations.
        forget_carry: the fraction of problems with a carry whose answer forgets the carry.
    """
    rng = np.random.default_rng([seed, 1])
    rounds = -(-count // len(problems))
    order = np.concatenate([rng.permutation(len(problems)) for _ in range(rounds)])[:count]
    chosen = [problems[place] for place in order]
    return [(problem, problem.working(forget_carry=rng.random() < forget_carry)) for problem in chosen]


def write_problems(path: Path, problems: Sequence[Problem], *, part: str) -> None:
    """Write a file of prompts for `tandem train`.

    Args:
        path: the parquet file.
        problems: one row each.
        part: "train" or "validation", which is stored in each row.
    """
    rows: list[dict[str, Any]] = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {
                "split": part,
                "index": index,
                "question": problem.question,
                "answer": problem.working(),
            },
        }
        for index, problem in enumerate(problems)
    ]
    write_rows(path, rows)


def write_demonstrations(path: Path, demonstrated: Sequence[tuple[str, str]]) -> None:
    """Write a file of questions and responses for `tandem sft`."""
    rows = [
        {"prompt": [{"role": "user", "content": question}], "response": response}
        for question, response in demonstrated
    ]
    write_rows(path, rows)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to a parquet file."""
    pa_parquet.write_table(pa.Table.from_pylist(list(rows)), path)
