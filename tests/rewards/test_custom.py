"""Loading a reward function from a user's file, and the messages when that is not possible."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import RewardError
from tandem.rewards import Item, load_custom, score

GOOD = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Weights:
    length: float = 0.5

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": Weights().length * len(solution_str) + bonus, "right": solution_str == ground_truth}

def all_at_once(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(text) for text in solution_strs]

all_at_once.batched = True

def three(data_source, solution_str, ground_truth):
    return 0.0

number = 5
"""


@pytest.fixture
def good(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(GOOD)
    return str(tmp_path / "mine.py")


def raised(*args: Any) -> RewardError:
    with pytest.raises(RewardError) as caught:
        load_custom(*args)
    return caught.value


def test_file(good: str) -> None:
    reward = load_custom(good, "compute_score", {"bonus": 1})
    (scored,) = score([Item("whatever", "abc", "abc")], reward)
    assert scored.score == 2.5
    assert scored.extra == {"right": 1.0}


def test_batched_function_in_a_file(good: str) -> None:
    reward = load_custom(good, "all_at_once")
    assert [entry.score for entry in score([Item("a", "x", ""), Item("b", "yz", "")], reward)] == [1, 2]


def test_module_by_dotted_name() -> None:
    reward = load_custom("tandem.rewards.gsm8k", kwargs={"method": "flexible"})
    assert score([Item("mine", "it is 4", "4")], reward)[0].score == 1


def test_missing_file(tmp_path: Path) -> None:
    path = str(tmp_path / "absent.py")
    assert str(raised(path)).startswith(f"custom_reward_function.path: no such file\n  got:      {path}")


def test_missing_module() -> None:
    error = raised("no_such_package.reward")
    assert "loading it raised ModuleNotFoundError: No module named 'no_such_package'" in str(error)
    assert isinstance(error.__cause__, ModuleNotFoundError)


def test_file_that_raises(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1 / 0\n")
    error = raised(str(tmp_path / "bad.py"))
    assert "loading it raised ZeroDivisionError: division by zero" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_missing_function_names_the_nearest(good: str) -> None:
    text = str(raised(good, "compute_scores"))
    assert text.startswith("custom_reward_function.name: no such function\n")
    assert "all_at_once, compute_score, three" in text or "compute_score, all_at_once, three" in text
    assert "remedy:   custom_reward_function.name=compute_score" in text
    assert "no such function" in str(raised(good, "number"))


def test_wrong_signature(good: str) -> None:
    text = str(raised(good, "three"))
    assert "cannot be called as needed: got an unexpected keyword argument 'extra_info'" in text
    assert "got:      (data_source, solution_str, ground_truth)\n" in text
    assert "expected: (data_source, solution_str, ground_truth, extra_info)\n" in text


def test_unknown_keyword(good: str) -> None:
    text = str(raised(good, "compute_score", {"bonsu": 1}))
    assert "got an unexpected keyword argument 'bonsu'" in text
    assert "reward_kwargs" in text


def test_in_another_process_it_is_loaded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that the module made on import, such as a lock, are not pickled. A relative path works."""
    (tmp_path / "locked.py").write_text(
        "import threading\nlock = threading.Lock()\nmade = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n"
        "    with lock:\n        made.append(1)\n        return len(made) + bonus\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = load_custom("locked.py", kwargs={"bonus": 0.5})
    item = Item("any", "text", "truth")
    assert [score([item], reward)[0].score for _ in range(2)] == [1.5, 2.5]
    sent = pickle.dumps(reward)
    monkeypatch.chdir("/")
    assert score([item], pickle.loads(sent))[0].score == 1.5


def test_a_module_that_moved_is_found_by_its_old_name() -> None:
    """Run folders of older versions have the old name in their config.yaml."""
    old, new = (load_custom(f"tandem.{package}.controls", "shuffled") for package in ("trainer.demo", "demo"))
    assert old.function is new.function
    with pytest.raises(RewardError, match=r"tandem\.trainer\.demolition"):
        load_custom("tandem.trainer.demolition")
