"""Checkpoints written while training continues appear only when complete, and no error is lost."""

import threading
import time

import pytest
import torch

from tandem.checkpoint import CheckpointManager
from tandem.checkpoint.background import BackgroundWrite, await_pending, written_mark
from tandem.errors import CheckpointError, EngineError


def names(root):
    return sorted(path.name for path in root.iterdir())


class Member:
    """A checkpoint member that writes when the test tells it to, or fails with an error."""

    def __init__(self, size=3, error=None):
        self.go, self.write = threading.Event(), BackgroundWrite()
        self.size, self.error = size, error

    def begin(self, folder):
        def run():
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
            (folder / "w.bin").write_bytes(bytes(self.size))

        self.write.start(run, written_mark(folder))


def test_it_is_there_once_all_members_have_written(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1)
    manager.save(1, {}, {"n": 1})
    actor, critic, tensor = Member(), Member(), torch.arange(3)
    state = {"n": 2, "rows": [1, 2], "tensor": tensor}
    pending = manager.begin(2, {"actor": actor.begin, "critic": critic.begin}, state)
    state["rows"].append(3)
    tensor.zero_()
    actor.go.set()
    assert not pending.wait(0.3)
    assert names(tmp_path) == ["step_000001", "step_000002.tmp"]
    assert CheckpointManager(tmp_path, read_only=True).latest().step == 1
    critic.go.set()
    assert pending.wait(30)
    pending.check()
    assert names(tmp_path) == ["step_000002"]
    found = manager.latest()
    assert (found.path, found.step) == (pending.path, 2)
    assert found.state.pop("tensor").tolist() == [0, 1, 2] and found.state == {"n": 2, "rows": [1, 2]}
    files = sorted(str(p.relative_to(found.path)) for p in found.path.rglob("*") if p.is_file())
    assert files == ["actor/w.bin", "critic/w.bin", "manifest.json", "state.pt"]


def test_a_member_that_cannot_begin_leaves_nothing(tmp_path):
    def refuses(folder):
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        CheckpointManager(tmp_path).begin(1, {"actor": Member().begin, "critic": refuses}, {})
    assert names(tmp_path) == []


def failed(folder, member):
    """Return the error of a second checkpoint, of which nothing is left."""
    manager = CheckpointManager(folder)
    manager.save(1, {"actor": lambda path: (path / "w.bin").write_bytes(bytes(500_000))}, {"n": 1})
    member.go.set()
    pending = manager.begin(2, {"actor": member.begin}, {"n": 2})
    with pytest.raises(CheckpointError) as caught:
        await_pending(pending, member.write.check, 30)
    assert names(folder) == ["step_000001"] and manager.latest().state == {"n": 1}
    member.write.check()  # the error is raised once
    return caught.value


def test_an_error_of_a_writer_ends_it_and_is_raised_once(tmp_path):
    assert "Input/output error" in failed(tmp_path, Member(error=OSError(5, "Input/output error"))).got


def test_a_full_disk_is_told_as_ever(small_disk):
    error = failed(small_disk, Member(size=3_000_000))
    assert "disk is full" in str(error) and "about 0.5 MB" in error.expected


def test_one_that_takes_too_long_is_given_up(tmp_path):
    member, start = Member(), time.monotonic()
    pending = CheckpointManager(tmp_path).begin(1, {"actor": member.begin}, {})
    with pytest.raises(CheckpointError, match="not written in time"):
        await_pending(pending, member.write.check, 0.2)
    assert time.monotonic() - start < 20
    assert names(tmp_path) == []
    with pytest.raises(EngineError, match="still being written"):
        member.begin(tmp_path)
    member.go.set()


def test_a_writers_error_is_not_lost_when_nobody_asked(tmp_path):
    member = Member(error=IndexError("gone"))
    member.go.set()
    member.begin(tmp_path)
    member.write._thread.join(30)
    with pytest.raises(IndexError):
        member.write.start(lambda: None, None)
