import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tandem.checkpoint import open_checkpoint
from tandem.engines.train import state
from tandem.errors import CheckpointError, RewardError
from tests.support.runs import assert_same, at_step, interrupt, same_weights

WORDS = "GAE steps=4 trainer.save_freq=1 trainer.max_ckpt_to_keep=2"
BESIDE = (WORDS, "trainer.async_save=true")


@pytest.fixture(scope="module")
def whole(lab):
    return lab.run("at_once", WORDS)


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def steps(*numbers):
    return [f"step_{number:06d}" for number in numbers]


def fail(path):
    raise OSError(5, "Input/output error")


@contextmanager
def writes(number, does):
    """Call `does` at the start of each background write of this step in runs inside the block."""
    write = state._write

    def slow(values: dict[str, Any], path: Path, group: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if f"step_{number:06d}" in str(path):
            does(path)
        write(values, path, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "_write", slow)
        yield


def test_the_same_run_and_the_same_checkpoints(lab, whole):
    run = lab.run("beside", *BESIDE)
    assert_same(run, whole)
    assert run.checkpoints == whole.checkpoints == steps(3, 4)
    shorter = lab.run("resumed", *BESIDE, "steps=2")
    assert shorter.checkpoints == steps(1, 2)
    resumed = lab.run("resumed", *BESIDE)
    assert any("after step 2" in sentence for sentence in resumed.said)
    assert_same(resumed, whole)


@pytest.mark.slow
def test_training_goes_on_meanwhile_and_the_end_waits(lab, whole):
    """The write of step 2 is held until step 3 is done; the last write takes a second."""
    step_three, seen = threading.Event(), []

    def look(trainer: Any) -> None:
        seen.extend(names(trainer.session.folder.path))
        step_three.set()

    def hold(path: Path) -> None:
        assert step_three.wait(60)

    with at_step(3, look, after=True), writes(2, hold), writes(4, lambda path: time.sleep(1.0)):
        run = lab.run("meanwhile", *BESIDE)
    assert seen == ["step_000001", "step_000002.tmp"]
    assert run.checkpoints == steps(3, 4)
    assert same_weights(run, whole)
    assert open_checkpoint(run.folder / "checkpoints" / "step_000004").step == 4
    assert [run.log.count(f"saved {run.folder}/checkpoints/{name}") for name in steps(1, 2, 3, 4)] == [1] * 4


def test_a_write_that_fails_stops_the_run_at_the_next_step(lab, whole):
    failed = threading.Event()

    def wait(_: Any) -> None:
        assert failed.wait(60)
        time.sleep(0.3)

    def fails(path: Path) -> None:
        failed.set()
        fail(path)

    with at_step(3, wait), writes(2, fails), pytest.raises(CheckpointError, match="Input/output error"):
        lab.run("fails", *BESIDE)
    assert names(lab.folder / "fails") == steps(1)
    assert_same(lab.run("fails", *BESIDE), whole)


def test_a_last_write_that_fails_is_not_lost(lab):
    with writes(4, fail), pytest.raises(CheckpointError, match="Input/output error"):
        lab.run("fails_last", *BESIDE)
    assert names(lab.folder / "fails_last") == steps(2, 3)


def test_ctrl_c_waits_for_its_checkpoint(lab, whole):
    with at_step(3, interrupt), writes(3, lambda path: time.sleep(0.5)):
        first = lab.run("ctrl_c", *BESIDE)
    assert first.checkpoints == steps(2, 3)
    assert any("step_000003; the same command resumes from it" in sentence for sentence in first.said)
    assert same_weights(lab.run("ctrl_c", *BESIDE), whole)


@pytest.mark.parametrize(
    ("error", "left"),
    [pytest.param(ZeroDivisionError, steps(1, 2), marks=pytest.mark.slow), (KeyboardInterrupt, steps(1))],
)
def test_an_error_lets_the_write_end_and_a_second_interrupt_does_not(lab, error, left):
    name, stop = f"stopped_{error.__name__}", Mock(side_effect=error)
    with at_step(3, stop), writes(2, lambda path: time.sleep(2.0)), pytest.raises(error):
        lab.run(name, *BESIDE)
    assert names(lab.folder / name) == left


def test_rewards_that_fail_cost_no_checkpoint(lab):
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
    late = lab.reward(f"calls = 0\n{head}\n    global calls\n    calls += 1\n    return 1 / (calls < 27)\n")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        lab.run("late", *BESIDE, late, "reward.num_workers=1")
    assert names(lab.folder / "late") == steps(1, 2)
