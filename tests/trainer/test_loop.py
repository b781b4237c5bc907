import json
import threading
from itertools import chain
from typing import Any

import pytest

from tandem.observability.reading import Run
from tandem.trainer.loop import Loop, Rhythm, Schedule
from tandem.trainer.ppo import PPOTrainer
from tests.support.runs import broken_off

WORDS = "steps=4 trainer.save_freq=2"


class OneStepOff(Schedule[Any]):
    """A schedule in which each step learns from samples of the weights before the last update."""

    def __init__(self) -> None:
        self.ahead: Any = None
        self.calls: list[str] = []
        self.resumed: dict[str, Any] = {}

    def begin(self, step: int, loop: Loop[Any]) -> Any:
        self.calls.append(f"generate {step}")
        return loop.generate(step, loop.next_batch())

    def step(self, step: int, loop: Loop[Any]) -> dict[str, float]:
        experience = self.ahead or self.begin(step, loop)
        self.ahead = self.begin(step + 1, loop)
        self.calls.append(f"learn {step}")
        return loop.learn(step, experience)

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.calls[-2]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed = state


def test_a_schedule_is_one_class(lab):
    schedule = OneStepOff()
    run = lab.run("ahead", WORDS, schedule=schedule)
    assert schedule.calls == [
        "generate 1", "generate 2", "learn 1", "generate 3", "learn 2", "generate 4", "learn 3", "generate 5",
        "learn 4",
    ]  # fmt: skip
    newest = [max(chain(*run.samples(step)["policy_version"])) for step in (1, 2, 3, 4)]
    assert newest == [0, 0, 1, 2]

    assert [row["rollout/version_lag"] for row in run.rows] == [0, 1, 1, 1]


def test_what_a_schedule_has_begun_is_in_the_checkpoint(lab):
    with broken_off(3):
        lab.run("broken", WORDS)
    schedule = OneStepOff()
    lab.run("broken", WORDS, schedule=schedule)
    assert schedule.resumed == {}, "the synchronous schedule begins nothing ahead"
    again = OneStepOff()
    lab.run("broken", WORDS, "steps=5", schedule=again)
    assert again.resumed == {"begun": "generate 5"}
    assert again.calls[:2] == ["generate 5", "generate 6"]


@pytest.mark.parametrize(
    ("freq", "saved", "validated"),
    [(0, [], []), (2, [2, 4, 5], [2, 4, 5]), (5, [5], [5]), (9, [5], [5]), (-1, [5], [])],
)
def test_what_happens_every_few_steps_happens_at_the_end_too(freq, saved, validated):
    rhythm = Rhythm(5, test_freq=freq, save_freq=freq)
    assert [step for step in range(1, 6) if rhythm.saves(step)] == saved
    assert [step for step in range(1, 6) if rhythm.validates(step)] == validated


def test_a_new_run_validates_first_and_one_that_only_validates_always():
    for key, firsts in (("val_before_train", [True, False]), ("val_only", [True, True])):
        assert [Rhythm(5, -1, -1, **{key: True}).validates_first(step) for step in (0, 3)] == firsts
    assert not Rhythm(5, -1, -1).validates_first(0)


class Watched(PPOTrainer):
    """A trainer whose run folder is read after its first step, while the run is alive."""

    seen: tuple[str, int, int | None] = ("", 0, None)

    def at_step_boundary(self, step: int) -> None:
        def look() -> None:
            run = Run(self.session.folder.path)
            self.seen = (run.state, run.steps, run.total_steps)

        if step == 1:
            reader = threading.Thread(target=look)
            reader.start()
            reader.join()


def test_a_run_that_is_watched_and_finishes(lab):
    finished = lab.run("watched", trainer=Watched)
    assert isinstance(finished.trainer, Watched)
    assert finished.trainer.seen == ("running", 1, 2)
    run = Run(finished.folder)
    assert (run.state, run.steps, run.total_steps) == ("finished", 2, 2)
    assert [event["event"] for event in run.events] == ["start", "end"]
    assert len(run.samples(2)) == 12
    assert {row["finish_reason"] for row in run.samples(2)} <= {"stop", "length"}
    assert json.dumps(run.samples(1))


def test_a_run_that_fails_and_one_that_goes_on(lab):
    words = "trainer.save_freq=1 steps=3"
    with broken_off(2):
        lab.run("ended", words)
    run = Run(lab.folder / "ended")
    assert (run.state, run.steps) == ("failed", 1)
    lab.run("ended", words)
    assert (run.state, run.steps, list(run.checkpoints)) == ("finished", 3, [1, 2, 3])
    starts = [event["step"] for event in run.events if event["event"] == "start"]
    assert starts == [0, 1]
