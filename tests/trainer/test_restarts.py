from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest

from tandem.cli.main import main
from tandem.errors import WorkerFailure
from tandem.observability.run import read_metrics
from tandem.runtime import LocalBackend
from tandem.trainer import assembly, launch
from tandem.trainer.ppo import PPOTrainer
from tandem.trainer.run import run_ppo
from tests.support.runs import at_step, interrupt, without_times

WORDS = "steps=4 A.ppo_mini_batch_size=2"


class Fails:
    """A loop that fails in the steps `at`, one for each start of the run."""

    def __init__(self, *at: int, restartable: bool = True) -> None:
        self.at, self.restartable, self.starts = list(at), restartable, 0

    def trainer(self) -> type[PPOTrainer]:
        plan = self

        class Failing(PPOTrainer):
            def fit(self) -> None:
                plan.starts += 1
                super().fit()

            def step(self, step: int, prompts: Any) -> dict[str, float]:
                metrics = super().step(step, prompts)
                if plan.at and step == plan.at[0]:
                    plan.at.pop(0)
                    raise WorkerFailure(f"actor rank 1 died in step {step}", restartable=plan.restartable)
                return metrics

        return Failing


@pytest.fixture(scope="module")
def whole(lab):
    return lab.run("whole", WORDS)


@pytest.fixture
def backends(monkeypatch):
    """Record every backend that is created; `closed` is set at its shutdown."""
    made: list[LocalBackend] = []

    class Watched(LocalBackend):
        closed = False

        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def shutdown(self) -> None:
            super().shutdown()
            self.closed = True

    monkeypatch.setattr(launch, "LocalBackend", Watched)
    return made


def attempt(lab, name, trainer, *words):
    said: list[str] = []
    run_ppo(lab.config(WORDS, *words, run=name), say=said.append, trainer=trainer)
    return said


def resumed_from(said):
    return [sentence[sentence.index("after step") :] for sentence in said if "resumed from" in sentence]


@pytest.mark.parametrize(
    ("mode", "save_freq", "at", "resumed"),
    [
        ("disable", 1, (3, 4), [2, 3]),
        pytest.param("auto", 2, (2, 4), [2], marks=pytest.mark.slow),
        ("disable", -1, (3,), []),
    ],
)
def test_it_finishes_unattended_as_if_nothing_had_failed(lab, whole, backends, mode, save_freq, at, resumed):
    """The run restarts from its newest checkpoint, whatever its resume mode, or else from the beginning."""
    fails, name = Fails(*at), f"again_{save_freq}_{mode}"
    words = f"trainer.max_restarts=2 trainer.save_freq={save_freq} trainer.resume_mode={mode}"
    said, folder = attempt(lab, name, fails.trainer(), words), lab.folder / name
    assert fails.starts == len(at) + 1
    assert without_times(read_metrics(folder / "metrics.jsonl")) == without_times(whole.rows)
    assert resumed_from(said) == [f"after step {step}" for step in resumed]
    for step in at:
        assert any(f"actor rank 1 died in step {step}\n" in sentence for sentence in said)
    assert [backend.closed for backend in backends] == [True] * (len(at) + 1)
    reports = "".join(path.read_text() for path in sorted(folder.rglob("failure.txt")))
    assert all(f"died in step {step}" in reports for step in at)


def test_one_failure_too_many_is_the_users(lab, backends):
    fails = Fails(2, 2)
    with pytest.raises(WorkerFailure, match="died in step 2"):
        attempt(lab, "too_many", fails.trainer(), "trainer.max_restarts=1 trainer.save_freq=1")
    assert fails.starts == 2
    assert all(backend.closed for backend in backends)
    text = (lab.folder / "too_many" / "log" / "failure.txt").read_text()
    assert text.count("actor rank 1 died in step 2") == 2


@pytest.mark.parametrize("interrupted", [False, True])
def test_no_run_starts_again_after_an_interrupt_or_what_the_user_must_mend(lab, interrupted):
    fails = Fails(2, restartable=interrupted)
    trainer = fails.trainer()
    at_two = at_step(2, interrupt, trainer=trainer) if interrupted else nullcontext()
    with at_two, pytest.raises(WorkerFailure):
        attempt(lab, f"ended_{interrupted}", trainer, "trainer.max_restarts=5")
    assert fails.starts == 1


@pytest.mark.slow
def test_a_resumed_branch_goes_on_from_its_own_checkpoints(lab, whole):
    """Without a checkpoint of its own, the run restarts from the one it resumed from, not from another."""
    source = lab.run("source", WORDS, "trainer.save_freq=1")
    step_2 = source.folder / "checkpoints" / "step_000002"
    start = f"trainer.resume_mode=resume_path trainer.resume_from_path={step_2}"
    for name, at, told in (("early", 3, 2), ("later", 4, 3)):
        strange = lab.run(name, "trainer.seed=9 steps=1 trainer.save_freq=1")
        assert strange.checkpoints == ["step_000001"]
        said = attempt(lab, name, Fails(at).trainer(), f"trainer.max_restarts=1 trainer.save_freq=1 {start}")
        assert resumed_from(said) == [f"after step {step}" for step in (2, told)]
        assert without_times(strange.rows)[-1] == without_times(whole.rows)[-1]


def test_the_command_line_says_the_report_and_fails(lab, monkeypatch, capsys, backends):
    failure = WorkerFailure("critic rank 0 died\n  in update_critic", restartable=True)
    monkeypatch.setattr(PPOTrainer, "step", Mock(side_effect=failure))
    assert main(["train", *lab.overrides(lab.folder / "command")]) == 1
    printed = capsys.readouterr()
    assert "tandem train: critic rank 0 died\n  in update_critic\n" in printed.err
    report = lab.folder / "command" / "log" / "failure.txt"
    assert f"report is in {report}." in printed.out
    assert "critic rank 0 died" in report.read_text()
    assert [backend.closed for backend in backends] == [True]


@pytest.mark.parametrize("where", ["data", "launch"])
def test_what_was_started_ends_when_building_fails(lab, monkeypatch, backends, where):
    part = (assembly, "_data") if where == "data" else (launch.Launcher, "launch")
    monkeypatch.setattr(*part, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        lab.run(f"built_{where}")
    assert [backend.closed for backend in backends] == [True]
    assert not (lab.folder / f"built_{where}").exists()


def test_a_workers_own_error_for_the_user_is_raised_as_it_is(lab, monkeypatch):
    """The error looks the same as on the local backend; a worker's report around it would hide the remedy."""
    from_worker = ValueError("unused")
    for cause, expected in ((launch.ConfigError("x"), launch.ConfigError), (from_worker, WorkerFailure)):
        failure = WorkerFailure("data rank 0 raised", restartable=False)
        failure.__cause__ = cause
        monkeypatch.setattr(assembly, "_data", Mock(side_effect=failure))
        with pytest.raises(expected) as caught:
            lab.run("unmended")
        assert type(caught.value) is expected
