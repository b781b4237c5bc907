"""Checkpoints that are written in the background: the run and its checkpoints are unchanged."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint import open_checkpoint
from tandem.engines.train import state
from tandem.errors import CheckpointError, RewardError
from tandem.trainer.ppo import PPOTrainer
from tests.support.runs import Finished, Lab, same_weights, without_times

WORDS = (
    "algorithm.adv_estimator=gae",
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=2",
)
BESIDE = (*WORDS, "trainer.async_save=true")


@pytest.fixture(scope="module")
def whole(lab: Lab) -> Finished:
    return lab.run("at_once", *WORDS)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def slow_writes(monkeypatch: pytest.MonkeyPatch, before: Callable[[Path], None]) -> None:
    """Call `before` at the start of each background write."""
    write = state._write

    def slow(values: dict[str, Any], path: Path, group: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        before(path)
        write(values, path, group)

    monkeypatch.setattr(state, "_write", slow)


def test_the_same_run_and_the_same_checkpoints(lab: Lab, whole: Finished) -> None:
    run = lab.run("beside", *BESIDE)
    assert same_weights(run, whole)
    assert without_times(run.rows) == without_times(whole.rows)
    assert names(run.folder) == names(whole.folder) == ["step_000003", "step_000004"]
    shorter = lab.run("resumed", *BESIDE, "trainer.total_training_steps=2")
    assert names(shorter.folder) == ["step_000001", "step_000002"]
    resumed = lab.run("resumed", *BESIDE)
    assert any("after step 2" in sentence for sentence in resumed.said)
    assert same_weights(resumed, whole)
    assert without_times(resumed.rows) == without_times(whole.rows)


def test_training_goes_on_meanwhile_and_the_end_waits(
    lab: Lab, whole: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of step 2 is held until step 3 is done; the last write takes a second."""
    step_three = threading.Event()
    seen: list[str] = []
    original = PPOTrainer.step

    def step(self: PPOTrainer, number: int, prompts: Any) -> dict[str, float]:
        metrics = original(self, number, prompts)
        if number == 3:
            seen.extend(names(self.session.folder.path))
            step_three.set()
        return metrics

    def hold(path: Path) -> None:
        if "step_000002" in str(path):
            assert step_three.wait(60)
        elif "step_000004" in str(path):
            time.sleep(1.0)

    monkeypatch.setattr(PPOTrainer, "step", step)
    slow_writes(monkeypatch, hold)
    run = lab.run("meanwhile", *BESIDE)
    assert seen == ["step_000001", "step_000002.tmp"]
    assert names(run.folder) == ["step_000003", "step_000004"]
    assert same_weights(run, whole)
    assert open_checkpoint(run.folder / "checkpoints" / "step_000004").step == 4
    assert run.trainer.session.saved
    log = (run.folder / "log" / "run.log").read_text()
    assert [log.count(f"saved {run.folder}/checkpoints/step_00000{step}") for step in range(1, 5)] == [1] * 4


def test_a_write_that_fails_stops_the_run_at_the_next_step(
    lab: Lab, whole: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    original = PPOTrainer.step

    def step(self: PPOTrainer, number: int, prompts: Any) -> dict[str, float]:
        if number == 3:
            assert failed.wait(60)
            time.sleep(0.3)
        return original(self, number, prompts)

    def fail(path: Path) -> None:
        if "step_000002" in str(path):
            failed.set()
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "step", step)
        slow_writes(patch, fail)
        with pytest.raises(CheckpointError, match="cannot be written") as caught:
            lab.run("fails", *BESIDE)
    assert "Input/output error" in caught.value.got
    assert names(lab.folder / "fails") == ["step_000001"]
    resumed = lab.run("fails", *BESIDE)
    assert same_weights(resumed, whole)
    assert [row["step"] for row in resumed.rows] == [1, 2, 3, 4]


def test_a_last_write_that_fails_is_not_lost(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        if "step_000004" in str(path):
            raise OSError(5, "Input/output error")

    slow_writes(monkeypatch, fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        lab.run("fails_last", *BESIDE)
    assert names(lab.folder / "fails_last") == ["step_000002", "step_000003"]


def test_ctrl_c_waits_for_its_checkpoint(lab: Lab, whole: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PPOTrainer.step

    def interrupted(self: PPOTrainer, number: int, prompts: Any) -> dict[str, float]:
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, number, prompts)

    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "step", interrupted)
        slow_writes(patch, lambda path: time.sleep(0.5))
        first = lab.run("ctrl_c", *BESIDE)
    assert names(first.folder) == ["step_000002", "step_000003"]
    assert any("step_000003; the same command resumes from it" in sentence for sentence in first.said)
    assert same_weights(lab.run("ctrl_c", *BESIDE), whole)


class Stop(Exception):
    """An error in the user's code."""


@pytest.mark.parametrize(
    ("error", "left"), [(Stop, ["step_000001", "step_000002"]), (KeyboardInterrupt, ["step_000001"])]
)
def test_an_error_lets_the_write_end_and_a_second_interrupt_does_not(
    lab: Lab, error: type[BaseException], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error or interrupt comes in step 3, while the checkpoint of step 2 is being written."""
    original = PPOTrainer.step

    def step(self: PPOTrainer, number: int, prompts: Any) -> dict[str, float]:
        if number == 3:
            raise error
        return original(self, number, prompts)

    def hold(path: Path) -> None:
        if "step_000002" in str(path):
            time.sleep(2.0)

    monkeypatch.setattr(PPOTrainer, "step", step)
    slow_writes(monkeypatch, hold)
    name = f"stopped_{error.__name__}"
    with pytest.raises(error):
        lab.run(name, *BESIDE)
    assert names(lab.folder / name) == left


def test_rewards_that_fail_cost_no_checkpoint(lab: Lab) -> None:
    """A reward fails in the third step of a separate run; the checkpoint before it is complete."""
    file = lab.folder / "fails_late.py"
    file.write_text(
        "calls = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return 1 / (calls < 27)\n"
    )
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        lab.run("late", *BESIDE, f"custom_reward_function.path={file}", "reward.num_workers=1")
    assert names(lab.folder / "late") == ["step_000001", "step_000002"]
