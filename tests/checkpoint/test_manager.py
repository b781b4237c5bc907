"""Checkpoints are whole or absent, whatever happens; the newest and the best are kept."""

import json
import math
import multiprocessing
import random
import shutil
import signal
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.checkpoint import CheckpointManager, open_checkpoint
from tandem.checkpoint.best import Best
from tandem.errors import CheckpointError, ConfigError
from tandem.lifetime import THREADLESS
from tests.checkpoint.saving_child import save, save_forever, values


def silent(sentence):
    raise AssertionError(f"nothing was to be said: {sentence}")


def assert_whole(path, step):
    for part, name in enumerate(("actor/shard_0.pt", "actor/shard_1.pt", "critic/shard.pt")):
        assert torch.equal(torch.load(path / name), values(step, part))


def names(root):
    return sorted(path.name for path in root.iterdir())


def saved(root, *steps, keep=None):
    manager = CheckpointManager(root, keep, log=silent)
    for step in steps:
        save(manager, step)
    return manager


def test_round_trip(tmp_path):
    state = {"rng": torch.get_rng_state(), "numpy": np.random.default_rng(1).bit_generator.state}
    state["nested"] = {"uids": ["a", "b"], "pair": (1, 2.5)}
    manager = CheckpointManager(tmp_path / "run" / "checkpoints", log=silent)
    assert manager.latest() is None
    path = manager.save(12, {"actor": lambda folder: (folder / "w.bin").write_bytes(b"abc")}, state)
    assert path == tmp_path / "run" / "checkpoints" / "step_000012"
    files = sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())
    assert files == ["actor/w.bin", "manifest.json", "state.pt"]
    found = manager.latest()
    assert (found.path, found.step) == (path, 12)
    assert torch.equal(found.state.pop("rng"), state.pop("rng"))
    assert found.state == state
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"]["actor/w.bin"] == {"bytes": 3, "sha256": sha256(b"abc").hexdigest()}
    assert open_checkpoint(path).step == 12


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 10, 10**6]), (1, [10**6]), (3, [2, 10, 10**6])])
def test_keeps_the_last(tmp_path, keep, left):
    manager = saved(tmp_path, 1, 2, 10, 1_000_000, keep=keep)
    assert names(tmp_path) == sorted(f"step_{step:06d}" for step in left)
    assert manager.latest().step == 1_000_000


def test_pruning_leaves_checkpoints_of_later_steps_and_other_files_alone(tmp_path):
    saved(tmp_path, 10, 20, 30)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "notes.tmp").write_text("mine")
    later = saved(tmp_path, 15, keep=1).later_than(15)
    assert [path.name for path in later] == ["step_000030", "step_000020"]
    assert names(tmp_path) == ["notes.tmp", "notes.txt", "step_000015", "step_000020", "step_000030"]


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("tandem.checkpoint.staging.sync", flushed.append)
    path = saved(tmp_path, 1).latest().path
    inside = {path.with_suffix(".tmp") / each.relative_to(path) for each in (path, *path.rglob("*"))}
    assert (set(flushed[:-1]), flushed[-1]) == (inside, tmp_path)


def test_keep_below_one(tmp_path):
    with pytest.raises(ConfigError, match="max_ckpt_to_keep"):
        CheckpointManager(tmp_path, 0)


def flip_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip_bit, truncate, Path.unlink, lambda file: file.write_bytes(b"")])
@pytest.mark.parametrize("name", ["actor/shard_1.pt", "state.pt", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage, name):
    said = []
    saved(tmp_path, 1, 2, 3)
    damage(tmp_path / "step_000003" / name)
    found = CheckpointManager(tmp_path, log=said.append).latest()
    assert (found.step, found.state) == (2, {"step": 2, "lr": 0.2})
    assert_whole(found.path, 2)
    assert len(said) == 1 and str(tmp_path / "step_000003" / name) in said[0]
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(tmp_path / "step_000003")


def test_every_bit_of_the_manifest_counts(tmp_path):
    path = CheckpointManager(tmp_path).save(1, {}, {})
    original = (path / "manifest.json").read_bytes()
    for place in range(0, len(original), 7):
        flipped = bytearray(original)
        flipped[place] ^= 1
        (path / "manifest.json").write_bytes(flipped)
        if flipped.split() != original.split():  # ignore changes of whitespace
            with pytest.raises(CheckpointError, match="manifest"):
                open_checkpoint(path)


def test_all_damaged_is_not_taken_for_a_fresh_start(tmp_path):
    said = []
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        flip_bit(tmp_path / f"step_00000{step}" / "state.pt")
    with pytest.raises(CheckpointError, match="step_000001, step_000002") as error:
        CheckpointManager(tmp_path, log=said.append).latest()
    assert "resume_mode=disable" in error.value.remedy
    assert len(said) == 2


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"sha256": 1}', "\xff"])
def test_a_folder_that_is_no_checkpoint(tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match="manifest"):
        open_checkpoint(tmp_path)


def test_saving_a_step_again_replaces_it(tmp_path):
    manager = CheckpointManager(tmp_path, log=silent)
    manager.save(5, {"actor": lambda folder: (folder / "old").touch()}, {"n": 1})
    manager.save(5, {}, {"n": 2})
    assert names(tmp_path) == ["step_000005"] and manager.latest().state == {"n": 2}
    assert not (tmp_path / "step_000005" / "actor").exists()


@pytest.mark.parametrize("error", [KeyError("a bug"), KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_a_writer_that_raises_leaves_nothing(tmp_path, error):
    manager = saved(tmp_path, 1, 2)

    def broken(folder):
        (folder / "half").write_bytes(b"x")
        raise error

    for step in (2, 3):
        with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)) as caught:
            manager.save(step, {"actor": broken}, {})
        assert str(error) in str(caught.value)
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert_whole(manager.latest().path, 2)


def test_an_interrupted_replacement_is_ended_at_the_start(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step_000002").rename(tmp_path / "step_000002.replaced")
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000001.replaced")
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000003.tmp")
    manager = CheckpointManager(tmp_path, log=silent)
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert_whole(manager.latest().path, 2)


def test_a_replacement_that_fails_at_the_last_moment_is_undone(tmp_path, monkeypatch):
    manager = saved(tmp_path, 1, 2)
    rename = Path.rename

    def failing(path, target):
        if path.suffix == ".tmp":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(manager, 2)
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert_whole(manager.latest().path, 2)


TOO_LARGE = (
    ({"actor": lambda folder: (folder / "w.bin").write_bytes(bytes(3_000_000))}, {"n": 2}),
    ({"actor": lambda folder: torch.save(torch.zeros(750_000), folder / "w.pt")}, {"n": 2}),
    ({}, {"noise": torch.rand(750_000)}),
)


@pytest.mark.parametrize("parts", TOO_LARGE, ids=["plain", "torch", "state"])
@pytest.mark.parametrize("step", [1, 2])
def test_full_disk(small_disk, parts, step):
    manager = CheckpointManager(small_disk, log=silent)
    manager.save(1, {"actor": lambda folder: (folder / "w.bin").write_bytes(bytes(500_000))}, {"n": 1})
    with pytest.raises(CheckpointError, match="disk is full") as error:
        manager.save(step, *parts)
    assert "MB" in error.value.got and "about 0.5 MB" in error.value.expected
    assert names(small_disk) == ["step_000001"] and manager.latest().state == {"n": 1}
    manager.save(3, {}, {"n": 3})
    assert manager.latest().state == {"n": 3}


def killed_after(root, seconds):
    """Start a process that saves checkpoints in an endless loop, and kill it after a while."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([save_forever.__module__])
    started = context.Event()
    child = context.Process(target=save_forever, args=(root, started))
    child.start()
    assert started.wait(60)
    time.sleep(seconds)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_kill_during_save(tmp_path, monkeypatch):
    """After any kill and the next start, all checkpoints are complete and no finished step is lost."""
    for name, value in THREADLESS.items():
        monkeypatch.setenv(name, value)
    draw, last, unfinished = random.Random(7), 0, 0
    for _ in range(20):
        killed_after(tmp_path, draw.uniform(0.0, 0.3))
        unfinished += any(not name[-1].isdigit() for name in names(tmp_path))
        before = max((int(name[5:11]) for name in names(tmp_path) if name.endswith(".replaced")), default=0)
        manager = CheckpointManager(tmp_path, keep=2, log=silent)
        found = manager.latest()
        step = 0 if found is None else found.step
        assert step >= max(last, before)
        if found is not None:
            assert found.state["step"] == step
            assert_whole(found.path, step)
        assert all(name[-1].isdigit() for name in names(tmp_path)) and len(names(tmp_path)) <= 3
        last = step
    assert last >= 1 and unfinished >= 3


VALUES = {1: 0.2, 2: 0.5, 3: 0.1, 4: 0.5, 5: 0.4, 6: 0.3}
ACCURACY = Best("val/accuracy")


def judged(root, best, values, keep=2):
    manager = CheckpointManager(root, keep, best=best)
    for step, value in values.items():
        manager.save(step, {}, {"n": step}, {} if value is None else {"val/accuracy": value, "loss": 1.0})
    return manager


def steps(root):
    return sorted(int(path.name[5:]) for path in root.iterdir())


def test_without_a_judge_only_the_last_are_kept(tmp_path):
    manager = judged(tmp_path, None, VALUES)
    assert steps(tmp_path) == [5, 6] and manager.best(ACCURACY) is None


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("max", VALUES, 2),  # the first of the best
        ("min", VALUES, 3),
        ("max", VALUES | {7: 0.6, 8: 0.1, 9: 0.1}, 7),
        *(("max", {1: no, 2: -3.0, 3: no, 4: no, 5: no}, 2) for no in (None, math.nan, math.inf)),
    ],
)
def test_the_best_is_kept_beside_the_last_two(tmp_path, mode, values, best):
    judge = Best("val/accuracy", mode)
    manager = judged(tmp_path, judge, values)
    last = max(values)
    assert steps(tmp_path) == sorted({best, last - 1, last})
    found = manager.best(judge)
    assert (found.step, found.state) == (best, {"n": best})
    assert manager.latest().step == last
    manifest = json.loads((tmp_path / f"step_{best:06d}" / "manifest.json").read_text())
    assert manifest["metric"] == {"name": "val/accuracy", "value": values[best]}
    assert manager.best(Best("loss")) is None


def test_damage_is_told_and_passed_over_in_the_choice(tmp_path):
    said = []
    judged(tmp_path, ACCURACY, {1: 0.9, 2: 0.5, 3: 0.1}, keep=None)
    (tmp_path / "step_000001" / "manifest.json").write_text("{")
    manager = CheckpointManager(tmp_path, best=ACCURACY, log=said.append)
    assert manager.best(ACCURACY).step == 2
    assert "step_000001" in said[0]


def test_random_values_against_a_plain_search(tmp_path):
    """After each save, the last two checkpoints and the best one among all saved so far are kept."""
    values = {step: ((step * 37) % 11) / 10 for step in range(1, 25)}
    manager = CheckpointManager(tmp_path, 2, best=Best("val/accuracy", "min"))
    for step, value in values.items():
        manager.save(step, {}, {}, {"val/accuracy": value})
        best = min(range(1, step + 1), key=lambda s: (values[s], s))
        assert steps(tmp_path) == sorted({best, max(1, step - 1), step})
