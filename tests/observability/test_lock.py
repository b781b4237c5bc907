import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from unittest.mock import Mock

import pytest

from tandem.errors import ConfigError
from tandem.observability.lock import ProcessLock, is_held, process_start

HOLDER = """
import sys, time
from pathlib import Path
from tandem.observability.lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]), "key", print)
lock.acquire()
{then}
print("held", flush=True)
time.sleep(60)
"""
FORK = """
import os
reads, writes = os.pipe()
if os.fork() == 0:
    os.write(writes, b"forked")
    time.sleep(60)
os.read(reads, 6)
"""


@pytest.fixture
def lock(tmp_path):
    """Return a function that makes a lock, and what it says."""
    said = []
    return lambda: ProcessLock(tmp_path / "run.lock", "trainer.default_local_dir", said.append), said


def _holder(path, then=""):
    words = [sys.executable, "-c", HOLDER.format(then=then), str(path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("then", ["", FORK], ids=["alone", "with_a_child_that_outlives_it"])
def test_a_second_process_is_told_of_the_first_until_that_was_killed(tmp_path, lock, then):
    path, (make, said) = tmp_path / "run.lock", lock
    holder = _holder(path, then)
    try:
        with pytest.raises(ConfigError) as caught:
            make().acquire()
        got = str(caught.value.got)
        assert f"process {holder.pid} on {socket.gethostname()} since {time.strftime('%Y-')}" in got
        assert f"kill {holder.pid}" in str(caught.value.remedy)
        assert (caught.value.field, said) == ("trainer.default_local_dir", [])
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        with make():
            assert str(holder.pid) in said[0] and "was killed or crashed" in said[0]
            assert json.loads(path.read_text())["pid"] == os.getpid()
        assert not path.exists()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate()


def test_it_can_be_taken_again_after_its_release(lock):
    make, said = lock
    first, other = make(), make()
    for _ in range(2):
        first.acquire()
    with pytest.raises(ConfigError):
        other.acquire()
    for _ in range(2):
        first.release()
    with other:
        assert said == []


def test_a_lock_left_by_another_machine_is_said_and_taken(tmp_path, lock):
    path, (make, said) = tmp_path / "run.lock", lock
    path.write_text(json.dumps({"host": "node7", "pid": 17, "since": "2026-01-01T00:00:00"}))
    with make():
        assert json.loads(path.read_text())["host"] == socket.gethostname()
    assert len(said) == 1 and "process 17 on node7" in said[0] and "between machines" in said[0]


def test_a_later_process_of_the_same_number_holds_nothing(tmp_path):
    path = tmp_path / "run.lock"
    held = {"host": socket.gethostname(), "pid": os.getpid()}
    for began, expected in ((process_start(os.getpid()), True), ("1", False)):
        path.write_text(json.dumps(held | {"began": began}))
        assert is_held(path) == expected


def test_a_file_system_without_locks_is_said(lock, monkeypatch):
    make, said = lock
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(38, "Function not implemented")))
    with make():
        assert "no locks" in said[0]
