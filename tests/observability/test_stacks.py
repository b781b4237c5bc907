import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.errors import DataError
from tandem.observability.stacks import ask_stacks, offer_stacks

SLEEPER = """
import sys, time
from pathlib import Path
from tandem.observability.stacks import offer_stacks

def waits_for_a_long_time():
    print("ready", flush=True)
    time.sleep(1000)

offer_stacks(Path(sys.argv[1]))
waits_for_a_long_time()
"""


@contextmanager
def sleeper(folder: Path, program: str = SLEEPER):
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_another_process_shows_where_it_is_and_goes_on(tmp_path):
    with pytest.raises(DataError, match="no run has started"):
        ask_stacks(tmp_path / "log")
    with sleeper(tmp_path) as process:
        for _ in range(2):
            name, stacks = ask_stacks(tmp_path)
            assert f"pid {process.pid}" in name
            assert "in waits_for_a_long_time" in stacks
            assert stacks.count("most recent call first") == 1
        assert process.poll() is None
    assert "has ended" in ask_stacks(tmp_path)[1]


def test_offering_anew_writes_to_the_new_folder(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        offer_stacks(tmp_path / name)
    assert "test_offering_anew" in ask_stacks(tmp_path / "b")[1]
    assert (tmp_path / "a" / "controller.stacks").read_text() == ""


def test_a_process_of_many_threads_says_that_some_are_missing(tmp_path):
    start = "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    many = SLEEPER.replace(
        "offer_stacks(Path", f"import threading\nfor _ in range(120):\n    {start}\noffer_stacks(Path"
    )
    with sleeper(tmp_path, many):
        stacks = ask_stacks(tmp_path)[1]
    assert stacks.count("most recent call first") == 100
    assert "main thread" in stacks.splitlines()[-1]
