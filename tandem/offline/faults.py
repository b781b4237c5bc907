"""What is wrong with rows that training can read, and would go wrong later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.data.forms import PromptForm
from tandem.errors import RewardError
from tandem.rewards.base import reward_for, scores_of
from tandem.rewards.items import Item

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE, UNREWARDED = "role", "no reward function"
Found = Iterator[tuple[str, str]]
"""Kinds of problems, and the problems."""


def odd_roles(key: str, prompt: Any, *, ended: bool = False) -> Found:
    """Roles that models are not taught; the assistant's last word, unless it is to be `ended`; no text."""
    if not isinstance(prompt, list) or not isinstance(prompt[0], Mapping):
        if isinstance(prompt, str) and not prompt.strip():
            yield "blank text", f"{key}: nothing but white space"
        return
    for place, message in enumerate(prompt):
        if message["role"] not in ROLES:
            yield ROLE, f"{key}: message {place}: {message['role']!r} is none of {', '.join(ROLES)}"
    if not ended and prompt[-1]["role"] == "assistant":
        yield ROLE, f"{key}: the assistant has the last word, and nothing is left to answer"
    if not any((message.get("content") or "").strip() for message in prompt):
        yield "blank text", f"{key}: nothing but white space"


def unscored(row: Mapping[str, Any], form: PromptForm) -> Found:
    """What the data source's reward will lack: there is none, or it cannot use the ground truth."""
    source, truth = form.source(row), form.truth(row)
    if truth == [] or (isinstance(truth, str) and not truth.strip()):
        yield "no answer", f"{form.answer_key or 'reward_model.ground_truth'}: empty"
        return
    try:
        reward = reward_for(source)
        if reward.bounded:  # it soon says what it thinks of this ground truth, whatever the response
            scores_of([reward], {0: Item(source, "", truth, row.get("extra_info") or {})})
    except RewardError as error:
        missing = error.field == f"data_source '{source}'"
        kind = UNREWARDED if missing else "no answer that the reward can use"
        yield kind, f"{form.reward_fn_key} {source!r}: {error.message}"
