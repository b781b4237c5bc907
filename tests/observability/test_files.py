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

from tandem.errors import ConfigError, DataError
from tandem.observability.files import append_line, whole_lines
from tandem.observability.journal import Journal
from tandem.observability.lock import ProcessLock, is_held, process_start
from tandem.observability.terminal import printable, say

WRITER = """
import sys
from pathlib import Path
from tandem.observability.files import append_line
for i in range(200):
    append_line(Path(sys.argv[1]), f"{sys.argv[2]} {i} " + "x" * (37 * i % 500), header="[")
"""


def test_lines_of_many_processes_stay_whole(tmp_path):
    path = tmp_path / "lines"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)]) for n in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    first, *lines = whole_lines(path)
    assert first == "["
    assert len(lines) == 800
    for n in range(4):
        mine = [line.split(" ") for line in lines if line.startswith(f"{n} ")]
        assert [(int(i), len(x)) for _, i, x in mine] == [(i, 37 * i % 500) for i in range(200)]


def test_a_torn_line_is_cut_off_once(tmp_path):
    path = tmp_path / "lines"
    path.write_text("whole\ntor")
    append_line(path, "next", header="[")
    append_line(path, "last")
    assert path.read_text() == "whole\nnext\nlast\n"
    path.write_text("torn from the start")
    append_line(path, "first", header="[")
    assert path.read_text() == "[\nfirst\n"


NASTY = "\x1b[31m\x9b2J\x07\r\u202e[/bold]\ud800"


def test_what_a_terminal_would_obey_is_written_out(capsys):
    shown = printable(NASTY)
    assert shown == "\\x1b[31m\\x9b2J\\x07\\r\\u202e[/bold]\\ud800"
    assert printable(shown) == shown
    assert printable("ü\n\tπ 👩‍🔬 مرحبا") == "ü\n\tπ 👩‍🔬 مرحبا"
    say(NASTY)
    assert capsys.readouterr().out == shown + "\n"


def test_entries_come_back_and_a_torn_one_does_not(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"n": 2})
    assert journal.entries == [] and not path.exists()
    journal.append([{"row": 0}, {"row": 1}])
    journal.append([])
    journal.append(iter([{"row": 2, "x": 0.1}]))
    with path.open("a") as file:
        file.write('{"row": 3, "x')
    again = Journal(path, {"n": 2})
    assert again.entries == [{"row": 0}, {"row": 1}, {"row": 2, "x": 0.1}]
    again.append([{"row": 3}])
    assert Journal(path, {"n": 2}).entries[3:] == [{"row": 3}]
    again.remove()
    again.remove()
    assert not path.exists()


def test_other_settings_are_named_and_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path, {"n": 2, "model": ["a", 1]}).append([{"row": 0}])
    assert Journal(path, {"model": ("a", 1), "n": 2}).entries == [{"row": 0}]
    with pytest.raises(ConfigError) as caught:
        Journal(path, {"n": 4, "model": ["a", 1]})
    assert (caught.value.got, caught.value.expected) == ("n=4", "n=2")
    assert "finished parts: 1" in str(caught.value)
    assert Journal(path, {"n": 4}, overwrite=True).entries == []
    assert not path.exists()


def test_a_file_of_something_else_is_refused_and_a_torn_first_line_is_no_journal_yet(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text("a song\n")
    with pytest.raises(DataError, match="not a journal"):
        Journal(path, {})
    path.write_text('{"settings"')
    Journal(path, {"n": 1}).append([{"row": 0}])
    assert Journal(path, {"n": 1}).entries == [{"row": 0}]


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
