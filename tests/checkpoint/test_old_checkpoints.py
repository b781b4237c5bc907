"""Checkpoints of an earlier version (old_runs.tar.xz) resume with the numbers of that version."""

import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from tandem.checkpoint.weights import read_weights
from tandem.config.load import load_train_config
from tandem.observability.run import read_metrics, read_samples
from tandem.trainer.assembly import build_ppo
from tests.support.runs import without_times


@pytest.fixture
def place(tmp_path, monkeypatch):
    with tarfile.open(Path(__file__).with_name("old_runs.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    for name in ("run", "two"):
        config = tmp_path / name / "config.yaml"
        config.write_text(config.read_text().replace("@HERE@", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def expected(place):
    """Return the earlier version's numbers of steps 3 and 4, and the digests of weights that it read."""
    return json.loads((place / "expected.json").read_text())


def go_on(run, *words):
    """Run two more steps in this process and return the trainer, with its workers shut down."""
    words = (f"trainer.default_local_dir={run}", "trainer.total_training_steps=4", *words)
    trainer = build_ppo(load_train_config(str(run / "config.yaml"), words).config, say=lambda said: None)
    try:
        trainer.fit()
    finally:
        trainer.shutdown()
    return trainer


def assert_close(row, then, names):
    """Compare metrics, up to the rounding of another processor."""
    for name in names:
        exact = not isinstance(then[name], float)
        assert row[name] == (then[name] if exact else pytest.approx(then[name], rel=1e-4, abs=1e-6)), name


def test_an_old_checkpoint_goes_on_as_the_old_version_went_on(place, expected):
    trainer = go_on(place / "run")
    rows = without_times(read_metrics(place / "run" / "metrics.jsonl"))[-2:]
    assert [row["step"] for row in rows] == [3, 4]
    for row, then in zip(rows, expected["metrics"], strict=True):
        common = then.keys() & row.keys()
        assert_close(row, then, common)
        assert common > {"actor/loss", "actor/grad_norm", "reward/mean", "actor/lr"}
    samples = [read_samples(place / "run" / "samples" / f"step_00000{step}.parquet") for step in (3, 4)]
    assert [each["tokens"] for each in samples] == expected["tokens"]
    weights = dict(trainer.roles.actor._workers._worker.actor.weights())
    sums = {name: float(value.double().sum()) for name, value in weights.items()}
    assert sums == pytest.approx(expected["weights"], rel=1e-4, abs=1e-5)


def test_the_shards_of_two_old_ranks_are_read_whole(place, expected):
    saved = place / "two" / "checkpoints" / "step_000002" / "actor"
    read = {n: hashlib.sha256(v.contiguous().numpy().tobytes()).hexdigest() for n, v in read_weights(saved)}
    assert read == expected["two"]["weights"]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_an_old_checkpoint_of_two_ranks_goes_on(place, expected):
    go_on(place / "two")
    rows = without_times(read_metrics(place / "two" / "metrics.jsonl"))[-2:]
    for row, then in zip(rows, expected["two"]["metrics"], strict=True):
        assert_close(row, then, {"step", "actor/loss", "actor/grad_norm", "reward/mean"})
