"""`tandem runs`: list, compare, plot and prune."""

import json
from pathlib import Path

import pytest

from tandem.cli import pruning
from tandem.observability.lock import ProcessLock
from tandem.observability.run import RunFolder
from tests.support.folders import write_run


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pruned(printed):
    """Return a function that prunes, and returns the folders that are listed."""

    def run(*words: str) -> set[str]:
        return {line.split()[2] for line in printed("runs", "prune", *words).splitlines()[:-1]}

    return run


def test_the_list(typed):
    write_run(Path("runs/a"), [0.25, 0.75, 0.5])
    RunFolder("runs/b/empty")
    RunFolder("runs/red\x1b[31m").log_metrics(1, {"rm/accuracy": 0.5})
    broken = RunFolder("runs/zz")
    broken.metrics_file.write_text("nothing\n")
    status, out, err = typed("runs")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split("  ")[0] == "run" and len(lines) == 5
    assert lines[1].split() == [
        *("runs/a", "grpo", "models/tiny", "3/3", "finished", "0.25", "→", "0.5", "→", "0.75", "6", "s"),
        *lines[1].split()[-2:],
    ]
    assert lines[1].split()[-1] in ("B", "kB")
    assert lines[2].split()[:5] == ["runs/b/empty", "?", "?", "0/?", "empty"]
    assert "runs/red\\x1b[31m" in lines[3] and "rm/accuracy" in lines[3] and " rm " in lines[3]
    assert "unreadable: line 1" in lines[4]


def test_the_list_for_programs(printed):
    path = write_run(Path("runs/a"), [0.25, 0.75, 0.5], config="critic: {optim: {lr: 1.0}}")
    out = printed("runs", "runs", "--json")
    facts = json.loads(out)
    assert facts == {
        "run": "runs/a", "algorithm": "grpo", "model": "models/tiny", "steps": 3, "total_steps": 3,
        "state": "finished", "metric": "reward/mean", "first": 0.25, "last": 0.5, "best": 0.75,
        "seconds": 6.0, "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
    }  # fmt: skip


def test_no_run_anywhere(typed):
    status, out, err = typed("runs")
    assert (status, out) == (1, "")
    assert err.startswith("tandem runs: runs: no run was found")


def test_two_runs_compared(printed):
    write_run(Path("a"), [0.25, 0.5], config="data: {train_batch_size: 8, max: {x: 1}, same: [1]}")
    write_run(Path("b"), [0.125], config="data: {train_batch_size: 9, max: {x: 1}, same: [1]}")
    out = printed("runs", "compare", "a", "b", "--metric", "actor/odd")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()[1:] if line.strip()}
    assert rows == {
        "data.train_batch_size": "8 9",
        "state": "finished finished",
        "steps": "2 1",
        "reward/mean": "0.25 → 0.5, best 0.5 at step 2 0.125 → 0.125, best 0.125 at step 1",
        "timing/step": "2 → 2 2 → 2",
        "actor/odd": "– –",
    }


def test_plots(printed, refused):
    write_run(Path("a"), [0.25, 0.5, 0.75])
    write_run(Path("b"), [0.125, 0.25])
    out = printed("runs", "plot", "a")
    assert "reward/mean" in out and "0.75" in out and "0.25" in out and "\x1b" not in out
    out = printed("runs", "plot", "a", "b", "--metric", "timing/step")
    assert "xx a" in out and "oo b" in out
    assert "reward/mean" in refused("runs", "plot", "a", "--metric", "reward/maen")


def test_pruning_keeps_the_newest_and_the_best(printed, pruned):
    run = write_run(Path("runs/a"), [0.1, 0.9, 0.3, 0.4, 0.5], checkpoints=[1, 2, 3, 4, 5])
    cut_off = run / "checkpoints" / "step_000005" / "weights"
    cut_off.write_bytes(b"x" * 999)  # 4 is the newest complete one
    write_run(Path("runs/one"), [0.5], checkpoints=[1])
    RunFolder("runs/empty")
    kept = RunFolder("runs/with_notes")
    (kept.path / "notes.txt").write_text("mine")
    assert pruned() == {f"runs/a/checkpoints/step_{n:06d}" for n in (1, 3, 5)} | {"runs/empty"}
    assert len(list((run / "checkpoints").iterdir())) == 5
    assert "deleted 4 folders" in printed("runs", "prune", "runs", "--yes")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000004"]
    assert (Path("runs/one/checkpoints/step_000001/weights")).exists()
    assert kept.path.exists() and not Path("runs/empty").exists()
    assert pruned() == set()


def test_pruning_by_the_metric_that_the_config_names(pruned):
    run = write_run(Path("a"), [0.1, 0.9, 0.3], checkpoints=[1, 2, 3])
    RunFolder(run).write_config("trainer: {keep_best: reward/mean, keep_best_mode: min}")
    assert pruned("a") == {"a/checkpoints/step_000002"}


def test_the_best_that_is_kept_is_the_best_of_those_saved(pruned):
    write_run(Path("a"), [0.1, 0.9, 0.6, 0.2, 0.3], checkpoints=[1, 3, 5])
    assert pruned("a") == {"a/checkpoints/step_000001"}


def test_a_run_without_a_whole_checkpoint_loses_none(pruned):
    run = write_run(Path("a"), [0.1, 0.9], checkpoints=[1, 2])
    for checkpoint in (run / "checkpoints").iterdir():
        (checkpoint / "manifest.json").unlink()
    assert pruned("a") == set()


def test_a_running_run_is_left_alone(printed, monkeypatch):
    run = write_run(Path("a"), [0.1, 0.9, 0.3], checkpoints=[1, 2, 3])
    with ProcessLock(run / "run.lock", "key", print):
        assert printed("runs", "prune", "a", "--yes").startswith("deleted 0 folders")
        monkeypatch.setattr(pruning.Run, "state", "interrupted")  # started after the scan
        out = printed("runs", "prune", "a", "--yes")
    assert "a/checkpoints/step_000001 was not deleted: a: " in out and "deleted 0 folders" in out
    assert len(list((run / "checkpoints").iterdir())) == 3
