import json
import threading

from tandem.observability.reading import Run
from tandem.trainer.ppo import PPOTrainer
from tests.support.runs import broken_off


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
        lab.run("broken", words)
    run = Run(lab.folder / "broken")
    assert (run.state, run.steps) == ("failed", 1)
    lab.run("broken", words)
    assert (run.state, run.steps, list(run.checkpoints)) == ("finished", 3, [1, 2, 3])
    starts = [event["step"] for event in run.events if event["event"] == "start"]
    assert starts == [0, 1]
