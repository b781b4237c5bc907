"""Tests that the files in the guide to your own algorithm train, and that its messages are real."""

import math
import re
from pathlib import Path

import pytest
import torch

from docs.entries import ROOT
from tandem.algorithms.registry import advantage_estimator
from tandem.errors import TandemError
from tests.support.runs import Finished, Lab, lab

__all__ = ["lab"]

GUIDE = (ROOT / "docs" / "your-own-algorithm.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", GUIDE, re.DOTALL)
FILES = {text.split("\n")[0].removeprefix("# "): text for kind, text in BLOCKS if kind == "python"}
COMMANDS = {
    text.strip(): message if answer == "text" else None
    for (kind, text), (answer, message) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True)
    if kind == "sh"
}
"""Each command, with the message that it ends with, or None."""

RUNS = [command for command, message in COMMANDS.items() if message is None]
REFUSED = [command for command, message in COMMANDS.items() if message is not None]

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 6
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the guide's files into a folder and make it the current folder."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(lab: Lab, folder: Path, command: str) -> Finished:
    words = command.removeprefix("tandem train … ").split()
    sizes = ("custom_reward_function.path=reward.py", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    trainer = lab.trainer(folder / "run", *sizes, *words)
    try:
        trainer.fit()
    finally:
        trainer.shutdown()
    return Finished(trainer, folder / "run", [])


@pytest.mark.parametrize("command", RUNS, ids=lambda command: re.search(r"my_\w+", command)[0])
def test_what_the_guide_shows_trains(command, lab, written):
    rows = run(lab, written, command).rows
    assert len(rows) >= 2
    assert all(math.isfinite(row["actor/loss"]) and row["actor/grad_norm"] > 0 for row in rows[-2:])
    assert "my_loss" not in command or rows[-1]["actor/ratio_distance"] > 0


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command.split(":")[-1])
def test_what_is_refused_says_so_in_these_words(command, lab, written):
    with pytest.raises(TandemError) as caught:
        run(lab, written, command)
    shown = COMMANDS[command]
    assert shown is not None
    pattern = re.escape(shown.strip()).replace("…", r"[^\0]*")
    assert re.search(pattern, str(caught.value)), str(caught.value)


def test_the_estimator_is_what_its_docstring_says(written):
    spec = advantage_estimator(str(written / "my_estimator.py:median_baseline"))
    columns = {
        "token_level_rewards": torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 7.0, 5.0]),
        "response_mask": torch.tensor([False, True, False, True, False, True, True]),
        "offsets": torch.tensor([0, 2, 4, 6, 7]),
        "group": torch.tensor([4, 4, 4, 9]),
    }
    found = spec(columns, scale=3.0).advantages
    assert found.tolist() == [0, 3 * (1 - 2), 0, 0, 0, 3 * (7 - 2), 0]
