import signal

import pytest

from tandem.errors import CheckpointError, ConfigErrors
from tandem.observability.reading import Run
from tandem.trainer.ppo import PPOTrainer
from tests.support.runs import assert_same, at_step, interrupt, same_weights, without_times


@pytest.fixture(scope="module")
def words(lab):
    words = "A.optim.lr_scheduler_type=cosine steps=8 trainer.test_freq=2 trainer.save_freq=2"
    return ("GAE ADAPTIVE A.ppo_mini_batch_size=2 A.shuffle=true", words, lab.validated)


@pytest.fixture(scope="module")
def whole(lab, words):
    return lab.run("whole", *words)


@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 3, 6))])
def test_a_resumed_run_equals_the_whole_one(lab, words, whole, step):
    resumed = lab.resumed(f"stopped_{step}", *words, at=step)
    assert_same(resumed, whole)
    assert resumed.samples(8)["tokens"] == whole.samples(8)["tokens"]


@pytest.mark.slow
def test_metrics_that_a_crash_lost_after_the_save_come_back(lab, words, whole):
    first = lab.run("gap", *words)
    lines = (first.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (first.folder / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    resumed = lab.run("gap", *words)
    assert [row["step"] for row in resumed.rows] == list(range(9))
    for name in ("actor/loss", "val/accuracy"):
        assert resumed.rows[-1][name] == whole.rows[-1][name]


def test_ctrl_c_finishes_the_step_saves_and_the_same_command_goes_on(lab, words, whole):
    with at_step(3, interrupt):
        first = lab.run("ctrl_c", *words)
    assert first.trainer.session.interrupted
    assert [row["step"] for row in first.rows] == [0, 1, 2, 3]
    assert "step_000003" in first.checkpoints
    assert any("resumes" in sentence for sentence in first.said)
    assert Run(first.folder).state == "interrupted"
    assert same_weights(lab.run("ctrl_c", *words), whole)


def test_ctrl_c_before_the_first_step_stops_at_once_and_claims_no_save(lab, words, monkeypatch, capfd):
    def interrupted(self, step):
        interrupt(self)
        pytest.fail("it went on")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(PPOTrainer, "validate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.run("ctrl_c_early", *words)
    assert "saved" not in capfd.readouterr().err
    assert list((lab.folder / "ctrl_c_early" / "checkpoints").iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(lab, words, whole):
    first = lab.run("damaged", *words)
    newest = first.folder / "checkpoints" / "step_000008"
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    resumed = lab.run("damaged", *words)
    assert any("step_000008" in sentence for sentence in resumed.said)
    assert same_weights(resumed, whole)


def test_resume_path_takes_that_checkpoint_and_a_missing_one_is_an_error(lab, words, whole):
    words = (*words, "trainer.resume_mode=resume_path")
    source = whole.folder / "checkpoints" / "step_000004"
    resumed = lab.run("branch", *words, f"trainer.resume_from_path={source}")
    assert same_weights(resumed, whole)
    assert resumed.rows[0]["step"] == 4
    with pytest.raises(ConfigErrors, match="step_000099"):
        lab.run("nowhere", *words, f"trainer.resume_from_path={source.parent / 'step_000099'}")


@pytest.mark.slow
def test_going_back_leaves_the_later_branch_aside(lab, words, whole):
    first = lab.run("back", *words)
    early = first.folder / "checkpoints" / "step_000002"
    from_early = f"trainer.resume_mode=resume_path trainer.resume_from_path={early}"
    again = lab.run("back", *words, from_early, "steps=3 trainer.save_freq=0")
    assert [row["step"] for row in again.rows] == [0, 1, 2, 3]
    assert again.checkpoints == ["step_000002"]
    aside = sorted(p.name for p in (again.folder / "earlier" / "000").iterdir())
    assert aside == ["step_000004", "step_000006", "step_000008"]
    assert_same(lab.run("back", *words), whole)


@pytest.mark.slow
def test_validation_only_loses_nothing_of_the_run(lab, words, whole):
    first = lab.run("looked_at", *words)
    before = without_times(first.rows)
    looked = lab.run("looked_at", *words, "trainer.val_only=true")
    assert without_times(looked.rows) == before
    assert (first.folder / "samples" / "step_000008.parquet").is_file()


def test_a_new_run_in_an_old_folder_sets_the_old_one_aside(lab):
    rows = lab.run("twice").rows
    second = lab.run("twice")
    assert [row["step"] for row in second.rows] == [1, 2]
    aside = second.folder / "earlier" / "000" / "metrics.jsonl"
    assert len(aside.read_text().splitlines()) == len(rows)
    assert any("earlier" in sentence for sentence in second.said)


def test_a_critic_cannot_resume_where_none_was(lab):
    lab.run("no_critic", "trainer.save_freq=2")
    with pytest.raises(CheckpointError, match="critic"):
        lab.run("no_critic", "trainer.save_freq=2 GAE trainer.resume_with_changes=true steps=3")
