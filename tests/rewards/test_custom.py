import pickle

import pytest

from tandem.errors import RewardError
from tandem.rewards import Item, load_custom, score
from tests.support.refusing import refused

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
def good(tmp_path):
    (tmp_path / "mine.py").write_text(GOOD)
    return str(tmp_path / "mine.py")


def raised(*args):
    error = refused(RewardError, lambda: load_custom(*args))
    return error


def test_a_file_and_a_module(good):
    (scored,) = score([Item("whatever", "abc", "abc")], load_custom(good, "compute_score", {"bonus": 1}))
    assert scored.score == 2.5 and scored.extra == {"right": 1.0}
    batched = load_custom(good, "all_at_once")
    assert [entry.score for entry in score([Item("a", "x", ""), Item("b", "yz", "")], batched)] == [1, 2]
    flexible = load_custom("tandem.rewards.gsm8k", kwargs={"method": "flexible"})
    assert score([Item("mine", "it is 4", "4")], flexible)[0].score == 1


def test_what_cannot_be_loaded(tmp_path):
    absent = str(tmp_path / "absent.py")
    error = raised(absent)
    assert (error.field, error.got) == ("custom_reward_function.path", absent)
    error = raised("no_such_package.reward")
    assert isinstance(error.__cause__, ModuleNotFoundError) and "no_such_package" in error.message
    (tmp_path / "bad.py").write_text("x = 1 / 0\n")
    error = raised(str(tmp_path / "bad.py"))
    assert isinstance(error.__cause__, ZeroDivisionError) and "division by zero" in error.message


def test_what_is_wrong_with_a_function(good):
    error = raised(good, "compute_scores")
    assert error.field == raised(good, "number").field == "custom_reward_function.name"
    assert {"all_at_once", "compute_score", "three"} <= set(str(error.expected).replace(",", "").split())
    assert error.remedy == "custom_reward_function.name=compute_score"
    error = raised(good, "three")
    assert "'extra_info'" in error.message and error.got == "(data_source, solution_str, ground_truth)"
    assert error.expected == "(data_source, solution_str, ground_truth, extra_info)"
    text = str(raised(good, "compute_score", {"bonsu": 1}))
    assert "'bonsu'" in text and "reward_kwargs" in text


def test_in_another_process_it_is_loaded_anew(tmp_path, monkeypatch):
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


def test_a_module_that_moved_is_found_by_its_old_name():
    """Run folders of older versions have the old name in their config.yaml."""
    old, new = (load_custom(f"tandem.{package}.controls", "shuffled") for package in ("trainer.demo", "demo"))
    assert old.function is new.function
    refused(RewardError, lambda: load_custom("tandem.trainer.demolition"), r"tandem\.trainer\.demolition")
