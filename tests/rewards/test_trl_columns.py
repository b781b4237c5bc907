"""Rows of TRL's datasets that have completions beside their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.data.forms import PromptForm
from tandem.rewards import Reward, load_custom
from tandem.rewards.items import Item

ROW = {"prompt": "1+1=", "completion": "3", "completions": ["3"], "completion_ids": [7], "answer": "2"}
FUNCTIONS = {
    "def compute_score(completions, **columns): ...": {"prompts": ["1+1="], "completion_ids": [(5, 6)]},
    "def compute_score(prompts, responses, **columns): ...": {"prompts": ["1+1="], "responses": ["2"]},
}


def loaded(folder: Path, source: str) -> Reward:
    (folder / "own.py").write_text(source)
    return load_custom(str(folder / "own.py"))


def item() -> Item:
    return Item("data", "2", None, {}, 0, ROW, "0-0", (5, 6))


def test_a_completion_column_is_no_problem() -> None:
    for name in ("completion", "completions", "completion_ids"):
        assert (
            PromptForm(needs=("answer",)).problem({"prompt": "1+1=", "answer": "2", name: ROW[name]}) is None
        )
    wrong = PromptForm(needs=("answer",)).problem({"prompt": "1+1=", "answer": "2", "response": "3"})
    assert wrong is not None and "column name response" in wrong


@pytest.mark.parametrize("source", FUNCTIONS)
def test_functions_are_given_what_the_policy_wrote(tmp_path: Path, source: str) -> None:
    given: dict[str, Any] = loaded(tmp_path, source).arguments([item()])
    completions = {"completions": ["2"]} if "completions" in source else {}
    assert given == {"answer": ["2"], **completions, **FUNCTIONS[source]}


def test_a_function_for_one_response_too(tmp_path: Path) -> None:
    reward = loaded(tmp_path, "def compute_score(prompt, response, **columns): ...")
    assert reward.arguments([item()]) == {"prompt": "1+1=", "response": "2", "answer": "2"}
