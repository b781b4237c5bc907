import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tandem.lifetime import THREADLESS, fork_alone, make_scratch, remove_scratch, start_bound
from tests.support.warm import WarmProcess

PARENT = """
import subprocess, sys, threading, time
from tandem.lifetime import start_bound
options = {"start_new_session": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
child = []
thread = threading.Thread(target=lambda: child.append(start_bound(sys.argv[1:], **options)))
thread.start()
thread.join()  # the child must not end with the thread that asked for it
time.sleep(0.5)
print(child[0].pid, child[0].poll(), flush=True)
time.sleep(600)
"""


LAST_WORDS = """
from tandem.lifetime import end_now, last_words
last_words += [lambda: print(1, flush=True), lambda: 1 / 0, lambda: print(2, flush=True)]
end_now(7)
"""


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.mark.skipif(sys.platform != "linux", reason="a child is told of its parent's end on Linux alone")
def test_a_child_does_not_outlive_a_parent_that_is_killed():
    command = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *command], stdout=subprocess.PIPE, text=True)
    with parent:
        pid, status = parent.stdout.readline().split()
        assert status == "None" and lives(int(pid))
        parent.send_signal(signal.SIGKILL)
        until = time.monotonic() + 5
        while lives(int(pid)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not lives(int(pid))


def test_what_was_imported_without_threads_may_fork():
    program = "import os, numpy, pyarrow, torch, tandem.lifetime as l; os._exit(0 if l.fork_alone() else 0)"
    subprocess.run([sys.executable, "-c", program], env=os.environ | THREADLESS, timeout=120, check=True)


def test_a_process_with_threads_does_not_fork():
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    with pytest.raises(RuntimeError):
        fork_alone()
    waiting.set()
    thread.join()


def test_the_server_of_warm_processes_has_one_thread(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os; print(len(os.listdir(f'/proc/{os.getppid()}/task')))")
    with WarmProcess([sys.executable, program], stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate(timeout=280)[0] == "1\n"


def test_a_child_is_waited_for_as_any_other():
    child = start_bound([sys.executable, "-c", "import os; print(os.getppid())"], stdout=subprocess.PIPE)
    out, _ = child.communicate(timeout=30)
    assert (int(out), child.returncode) == (os.getpid(), 0)


def test_a_program_that_is_not_there_is_said_to_the_caller():
    with pytest.raises(FileNotFoundError):
        start_bound(["/no/such/program"])


OWNER = """
import sys, tempfile, multiprocessing.util
from tandem.lifetime import make_scratch
print(make_scratch("test"), multiprocessing.util.get_temp_dir(), flush=True)
sys.stdin.read()
"""


def owner(place: Path) -> tuple[subprocess.Popen[str], list[Path]]:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = os.environ | {"TMPDIR": str(place)}
    process = subprocess.Popen([sys.executable, "-c", OWNER], env=env, **streams)
    return process, [Path(name) for name in process.stdout.readline().split()]


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(tmp_path):
    killed, left = owner(tmp_path)
    alive, held = owner(tmp_path)
    other = tmp_path / "tandem-of-somebody"
    other.mkdir()
    try:
        assert len(left) == len(held) == 2
        (left[0] / "file").write_text("x", encoding="utf-8")
        killed.kill()
        killed.wait()
        assert all(path.is_dir() for path in (*left, *held))
        last, own = owner(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([*held, *own, other])
        last.communicate("")
        assert sorted(tmp_path.iterdir()) == sorted([*held, other])
    finally:
        for process in (killed, alive):
            process.kill()
            process.communicate()


def test_the_last_word_is_said_first_and_a_failure_keeps_none_from_speaking():
    ended = subprocess.run([sys.executable, "-c", LAST_WORDS], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (7, "2\n1\n")


def test_another_users_folder_stays(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    theirs = tmp_path / "tandem-scratch-test-of-another"
    theirs.mkdir()
    os.chown(theirs, 12345, -1)
    remove_scratch(make_scratch("test", tmp_path))
    assert list(tmp_path.iterdir()) == [theirs]


MANY = """
import sys
from pathlib import Path
from tandem.lifetime import make_scratch, remove_scratch
for _ in range(300):
    folder = make_scratch("many", Path(sys.argv[1]))
    assert folder.is_dir()
    remove_scratch(folder)
"""


def test_processes_that_start_together_do_not_take_each_others_folders(tmp_path):
    command = [sys.executable, "-c", MANY, str(tmp_path)]
    starts = [subprocess.Popen(command) for _ in range(4)]
    assert [each.wait(60) for each in starts] == [0, 0, 0, 0]
    assert list(tmp_path.iterdir()) == []
