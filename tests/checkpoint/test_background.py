"""Checkpoints written while training continues appear only when complete, and no error is lost."""

import threading
import time
from pathlib import Path

import pytest
import torch

from tandem.checkpoint import CheckpointManager
from tandem.checkpoint.background import BackgroundWrite, await_pending, written_mark
from tandem.errors import CheckpointError, EngineError


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


class Member:
    """A checkpoint member that writes when the test tells it to."""

    def __init__(self, size: int = 3) -> None:
        self.go = threading.Event()
        self.write = BackgroundWrite()
        self.size = size

    def begin(self, folder: Path) -> None:
        def run() -> None:
            assert self.go.wait(30)
            (folder / "w.bin").write_bytes(bytes(self.size))

        self.write.start(run, written_mark(folder))


def ended(pending, limit_s=30.0) -> bool:
    return pending.wait(limit_s)


def test_it_is_there_once_all_members_have_written(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {}, {"n": 1})
    actor, critic = Member(), Member()
    state = {"n": 2, "rows": [1, 2]}
    pending = manager.begin(2, {"actor": actor.begin, "critic": critic.begin}, state)
    state["rows"].append(3)
    actor.go.set()
    assert not pending.wait(0.3)
    assert names(tmp_path) == ["step_000001", "step_000002.tmp"]
    assert CheckpointManager(tmp_path, read_only=True).latest().step == 1
    critic.go.set()
    assert ended(pending)
    pending.check()
    assert names(tmp_path) == ["step_000001", "step_000002"]
    found = manager.latest()
    assert (found.path, found.step) == (pending.path, 2)
    assert found.state == {"n": 2, "rows": [1, 2]}
    files = sorted(str(p.relative_to(found.path)) for p in found.path.rglob("*") if p.is_file())
    assert files == ["actor/w.bin", "critic/w.bin", "manifest.json", "state.pt"]


def test_old_ones_go_when_the_new_one_is_there(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, {}, {})
    member = Member()
    pending = manager.begin(2, {"actor": member.begin}, {})
    assert "step_000001" in names(tmp_path)
    member.go.set()
    assert ended(pending)
    assert names(tmp_path) == ["step_000002"]


def test_a_member_that_cannot_begin_leaves_nothing(tmp_path):
    manager = CheckpointManager(tmp_path)

    def refuses(folder: Path) -> None:
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        manager.begin(1, {"actor": Member().begin, "critic": refuses}, {})
    assert names(tmp_path) == []


def test_an_error_of_a_writer_ends_it_and_is_raised_once(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {}, {"n": 1})
    write = BackgroundWrite()

    def breaks() -> None:
        raise OSError(5, "Input/output error")

    pending = manager.begin(
        2, {"actor": lambda folder: write.start(breaks, written_mark(folder))}, {}
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        await_pending(pending, write.check, 30)
    assert "Input/output error" in caught.value.got
    assert names(tmp_path) == ["step_000001"]
    write.check()


def test_a_full_disk_is_told_as_ever(small_disk):
    manager = CheckpointManager(small_disk)
    manager.save(1, {"actor": lambda folder: (folder / "w.bin").write_bytes(bytes(500_000))}, {"n": 1})
    member = Member(size=3_000_000)
    pending = manager.begin(2, {"actor": member.begin}, {"n": 2})
    member.go.set()
    with pytest.raises(CheckpointError, match="disk is full") as caught:
        await_pending(pending, member.write.check, 30)
    assert "about 0.5 MB" in caught.value.expected
    assert names(small_disk) == ["step_000001"]
    assert manager.latest().state == {"n": 1}


def test_one_that_takes_too_long_is_given_up(tmp_path):
    manager = CheckpointManager(tmp_path)
    member = Member()
    start = time.monotonic()
    pending = manager.begin(1, {"actor": member.begin}, {})
    with pytest.raises(CheckpointError, match="not written in time"):
        await_pending(pending, member.write.check, 0.2)
    assert time.monotonic() - start < 20
    assert names(tmp_path) == []
    with pytest.raises(EngineError, match="still being written"):
        member.begin(tmp_path)
    member.go.set()


def test_a_writers_error_is_not_lost_when_nobody_asked(tmp_path):
    def breaks() -> None:
        raise IndexError("gone")

    write = BackgroundWrite()
    write.start(breaks, None)
    limit = time.monotonic() + 30
    while write._thread.is_alive():
        assert time.monotonic() < limit
        time.sleep(0.01)
    with pytest.raises(IndexError):
        write.start(lambda: None, None)


def test_the_state_may_hold_tensors_that_change(tmp_path):
    manager = CheckpointManager(tmp_path)
    member = Member()
    rows = torch.arange(3)
    pending = manager.begin(1, {"actor": member.begin}, {"rows": rows})
    rows.zero_()
    member.go.set()
    assert ended(pending)
    assert manager.latest().state["rows"].tolist() == [0, 1, 2]
