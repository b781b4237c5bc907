"""Tasks of reasoning-gym for the demo: problems, and demonstrations of which about half are wrong."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.errors import ConfigError
from tandem.tasks import PREFIX, parse

ARITHMETIC = "arithmetic"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Gym:
    """A generator of small problems.

    Attributes:
        parameters: parameters of the generator, as in a task reference (see `tandem.tasks`).
        prompt: the longest prompt, in tokens of the demo's tokenizer.
        response: the longest response, in tokens of the demo's tokenizer, with its end token.
        warm_up: number of steps of supervised fine-tuning.
        steps: number of steps of reinforcement learning.
    """

    parameters: str
    prompt: int
    response: int
    warm_up: int = 250
    steps: int = 30

    def reference(self, name: str, size: int, seed: int) -> str:
        """Return the task reference for `data.train_files`.

        Problem i of a generator depends on its seed + i.
        """
        return f"{PREFIX}{name}?{self.parameters}&size={size}&seed={seed * size}&answer=text"


GYMS = {  # tasks with many different answers: a model would otherwise learn the common answer
    "ab": Gym("length=5", 16, 15, warm_up=400),
    "letter_jumble": Gym("min_words=1&max_words=1&min_word_len=3&max_word_len=3", 8, 6),
    "manipulate_matrix": Gym(
        "min_rows=2&max_rows=2&min_cols=2&max_cols=2&min_transforms=1&max_transforms=1&w_dmirror=99", 9, 8
    ),
    "number_sorting": Gym(
        "min_numbers=3&max_numbers=3&min_decimals=0&max_decimals=0&min_value=0&max_value=9", 16, 22
    ),
    "palindrome_generation": Gym("min_length=3&max_length=4", 16, 6),
    "rotate_matrix": Gym("min_n=2&max_n=2&min_rotations=1&max_rotations=1", 9, 8),
    "spell_backward": Gym("min_word_len=4&max_word_len=4", 6, 6),
    "spiral_matrix": Gym("min_n=2&max_n=2", 9, 8),
    "string_insertion": Gym("min_string_length=5&max_string_length=6", 10, 9),
    "word_sequence_reversal": Gym("min_words=2&max_words=2", 32, 31, warm_up=400, steps=45),
}
LONG = 12
"""The minimum number of characters of a text between the varying parts of questions to become a token."""
CHOICES = (ARITHMETIC, *GYMS)
SLIPS = 0.55
"""The fraction of wrong demonstrations. A model that imitates them is right less than half of the time."""


def check_task(name: str) -> None:
    """Check that the demo has this task.

    Raises:
        ConfigError: the task is unknown.
    """
    if name not in CHOICES:
        close = difflib.get_close_matches(name, CHOICES, n=1)
        raise ConfigError(
            "unknown task",
            field="TASK",
            got=name,
            expected=f"one of {', '.join(CHOICES)}",
            remedy=f"tandem demo {close[0]}" if close else None,
        )


def draw(name: str, *, seed: int, train: int, validation: int) -> tuple[list[Row], list[Row]]:
    """Return rows for training, and rows of different problems for validation.

    Args:
        name: a key of GYMS.
        seed: seed of the draw.
        train: number of training problems. Problems that also occur in validation are removed.
        validation: number of different validation problems.

    Raises:
        DataError: reasoning-gym is not installed.
    """
    rows = parse(GYMS[name].reference(name, train + validation, seed)).rows()
    examined = {question(row): row for row in reversed(rows)}
    kept = list(examined)[-validation:]
    return [row for row in rows if question(row) not in kept], [examined[each] for each in kept]


def question(row: Row) -> str:
    """Return the question of a row."""
    return str(row["prompt"][0]["content"])


def phrases(rows: Sequence[Row]) -> list[str]:
    """Return the texts that all questions share: their start, their end, and long texts in between.

    Each shared text becomes one token. Then most tokens of a prompt are specific to its problem.
    """
    asked = [question(row) for row in rows]
    head, tail = _ends(asked)
    return [phrase for phrase in (head, *_shared(own_parts(asked)), tail) if len(phrase) > 1]


def own_parts(questions: Sequence[str]) -> list[str]:
    """Return the questions without their common start and end."""
    head, tail = _ends(questions)
    return [asked[len(head) : len(asked) - len(tail)] for asked in questions]


def _shared(texts: Sequence[str]) -> list[str]:
    """Return the substrings of at least LONG characters that all texts share, in order."""
    shortest = min(texts, key=len)
    for size in range(len(shortest), LONG - 1, -1):
        for start in range(len(shortest) - size + 1):
            part = shortest[start : start + size]
            if all(part in text for text in texts):
                before, after = zip(*(text.split(part, 1) for text in texts), strict=True)
                return [*_shared(before), part, *_shared(after)]
    return []


def _ends(texts: Sequence[str]) -> tuple[str, str]:
    shared = os.path.commonprefix  # it compares characters, not parts of a path
    head = shared(list(texts))
    return head, shared([text[len(head) :][::-1] for text in texts])[::-1]


def slip(answer: str) -> str:
    """Return a wrong answer with a typical mistake.

    The last two numbers or words are swapped. If there are fewer than two, or if they are equal, 2 is added
    to the last number (some scorers accept a difference of one), or the last two letters are swapped.
    """
    parts = list(re.finditer(r"-?[\w.]+", answer))
    last = parts[-1]
    if len(parts) > 1 and parts[-2].group() != last.group():
        other = parts[-2]
        middle = answer[other.end() : last.start()]
        return f"{answer[: other.start()]}{last.group()}{middle}{other.group()}{answer[last.end() :]}"
    word = last.group()
    if word[-1].isdigit():
        wrong = str(float(word) + 2 if "." in word else int(word) + 2)
    elif word[-2:-1].lower() in ("", word[-1].lower()):
        wrong = word[:-1]
    else:
        wrong = f"{word[:-2]}{word[-1]}{word[-2]}"
    return f"{answer[: last.start()]}{wrong}{answer[last.end() :]}"


def demonstrations(rows: Sequence[Row], *, seed: int, count: int) -> list[tuple[str, str]]:
    """Return questions and answers for supervised fine-tuning. The fraction SLIPS of the answers is wrong.

    Args:
        rows: problems. The counts of two problems in the result differ by at most one.
        seed: seed of the order and of the mistakes.
        count: number of demonstrations.
    """
    rng = np.random.default_rng([seed, 1])
    order = np.concatenate([rng.permutation(len(rows)) for _ in range(-(-count // len(rows)))])[:count]
    chosen = [rows[place] for place in order]
    answers = [str(row["reward_model"]["ground_truth"]) for row in chosen]
    return [
        (question(row), slip(answer) if rng.random() < SLIPS else answer)
        for row, answer in zip(chosen, answers, strict=True)
    ]
