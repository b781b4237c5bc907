"""Find faults of rows that training accepts but that cause problems later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.data.forms import PromptForm
from tandem.errors import RewardError
from tandem.rewards.base import reward_for, scores_of
from tandem.rewards.items import Item

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE, UNREWARDED = "role", "no reward function"
Faults = Iterator[tuple[str, str]]
"""An iterator of (type of problem, description)."""


def conversation_faults(key: str, prompt: Any, *, ended: bool = False) -> Faults:
    """Yield unusual roles, a last turn of the assistant (unless `ended`), and conversations without text."""
    if not isinstance(prompt, list) or not isinstance(prompt[0], Mapping):
        if isinstance(prompt, str) and not prompt.strip():
            yield "blank text", f"{key}: nothing but white space"
        return
    for place, message in enumerate(prompt):
        if message["role"] not in ROLES:
            yield ROLE, f"{key}: message {place}: {message['role']!r} is not one of {', '.join(ROLES)}"
    if not ended and prompt[-1]["role"] == "assistant":
        yield ROLE, f"{key}: the last message is the assistant's, so there is nothing to answer"
    if not any((message.get("content") or "").strip() for message in prompt):
        yield "blank text", f"{key}: nothing but white space"


def reward_faults(row: Mapping[str, Any], form: PromptForm) -> Faults:
    """Yield the reasons why the reward of the row's data source cannot score responses to the row.

    There may be no reward, or the reward cannot use the ground truth.
    """
    source, truth = form.source(row), form.truth(row)
    if truth == [] or (isinstance(truth, str) and not truth.strip()):
        yield "no answer", f"{form.answer_key or 'reward_model.ground_truth'}: empty"
        return
    try:
        reward = reward_for(source)
        if reward.bounded:  # fast, and any response shows whether it can use the ground truth
            scores_of([reward], {0: Item(source, "", truth, row.get("extra_info") or {})})
    except RewardError as error:
        missing = error.field == f"data_source '{source}'"
        kind = UNREWARDED if missing else "no answer that the reward can use"
        yield kind, f"{form.reward_fn_key} {source!r}: {error.message}"
