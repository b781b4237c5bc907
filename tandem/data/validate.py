"""Checks of data rows. The problems of all rows are collected and reported in one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tandem.errors import DataError

SHOWN = 10
"""The maximum number of rows named in a message. Other rows are only counted."""


class RowProblems:
    """A collection of the problems of rows.

    Args:
        where: A function from a row number to the row's name for messages.
    """

    def __init__(self, where: Callable[[int], str]) -> None:
        self._where = where
        self._shown: list[str] = []
        self.count = 0

    def add(self, row: int, problem: str) -> None:
        self.count += 1
        if len(self._shown) < SHOWN:
            self._shown.append(f"{self._where(row)}: {problem}")

    def raise_if_any(self, message: str, *, field: str, expected: str, remedy: str) -> None:
        """Raise one error for all collected problems.

        Raises:
            DataError: There are problems. The error names the first rows and their problems.
        """
        if not self.count:
            return
        more = [f"and {self.count - SHOWN} more"] if self.count > SHOWN else []
        raise DataError(
            f"{self.count} row(s) {message}",
            field=field,
            got="\n            ".join([*self._shown, *more]),
            expected=expected,
            remedy=remedy,
        )


def conversation_problem(value: Any) -> str | None:
    """Return why `value` is not a list of {role, content} with texts; None if it is valid."""
    if not isinstance(value, list):
        return f"not a list of messages but {kind(value)}"
    if not value:
        return "an empty list of messages"
    for place, message in enumerate(value):
        if not isinstance(message, dict):
            return f"message {place} is not {{role, content}} but {kind(message)}"
        for key in ("role",) if message.get("tool_calls") else ("role", "content"):
            if not isinstance(message.get(key), str):
                state = f"is {kind(message[key])}" if key in message else "is missing"
                return f"message {place}: '{key}' {state}, not text"
    return None


def prompt_problem(value: Any) -> str | None:
    """Return why `value` is not a prompt; None if it is non-empty text or a conversation."""
    if isinstance(value, str):
        return None if value else "an empty text"
    return conversation_problem(value)


def reward_problem(row: Mapping[str, Any], reward_fn_key: str) -> str | None:
    """Return a message if the row lacks the reward's data source or ground truth; else None."""
    source = row[reward_fn_key]
    if not isinstance(source, str) or not source:
        return f"{reward_fn_key} is {source!r}, not a name"
    model = row["reward_model"]
    if not isinstance(model, dict):
        return f"reward_model is {kind(model)}, not {{style, ground_truth}}"
    if model.get("ground_truth") is None:
        return "reward_model has no ground_truth"
    extra = row.get("extra_info")
    if extra is not None and not isinstance(extra, dict):
        return f"extra_info is {kind(extra)}, not a mapping"
    return None


def kind(value: Any) -> str:
    """Return a description of a value's type."""
    return "null" if value is None else f"of type {type(value).__name__}"
