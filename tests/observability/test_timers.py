import io
import json
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from rich.console import Console

from tandem.errors import DataError
from tandem.observability import progress
from tandem.observability.progress import Progress
from tandem.observability.stacks import ask_stacks, offer_stacks
from tandem.observability.timers import Timeline, read_timeline


def test_seconds_add_up_and_are_taken_once():
    timeline = Timeline()
    for _ in range(2):
        with timeline.phase("gen"), timeline.phase("reshard"):
            time.sleep(0.02)
    with timeline.phase("adv"):
        pass
    taken = timeline.take()
    assert list(taken) == ["timing/reshard", "timing/gen", "timing/adv"]
    assert 0.04 <= taken["timing/reshard"] <= taken["timing/gen"] < 1.0 and taken["timing/adv"] < 0.02
    assert timeline.take() == {}


def test_the_trace_nests_begins_and_ends(tmp_path):
    path = tmp_path / "timeline.json"
    actor, critic = (Timeline(path, process=name) for name in ("actor rank 0", "critic rank 0"))
    before = time.time()
    with actor.phase("step", number=7), critic.phase("gen"):
        time.sleep(0.01)
    after = time.time()
    events = read_timeline(path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    events = [event for event in events if event["ph"] != "M"]
    outer, inner = ("actor rank 0", "step"), ("critic rank 0", "gen")
    found = [(names[event["tid"]], event["name"], event["ph"]) for event in events]
    assert found == [(*outer, "B"), (*inner, "B"), (*inner, "E"), (*outer, "E")]
    assert events[0]["args"] == {"number": 7}
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    assert times[2] - times[1] >= 10_000
    assert before - 0.1 <= times[0] / 1e6 <= times[3] / 1e6 <= after + 0.1
    assert json.loads(path.read_text().rstrip().rstrip(",") + "]")  # the closing bracket is optional


def test_a_phase_that_fails_is_timed_and_closed(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    with pytest.raises(ValueError, match="boom"), timeline.phase("reward"):
        raise ValueError("boom")
    assert "timing/reward" in timeline.take()
    assert [event["ph"] for event in read_timeline(tmp_path / "timeline.json")] == ["M", "B", "E"]


def test_after_a_crash_the_trace_reads_and_goes_on_in_its_own_track(tmp_path):
    path = tmp_path / "timeline.json"
    interrupted = Timeline(path).phase("gen")
    interrupted.__enter__()
    with path.open("a") as file:
        file.write('{"name": "torn", "ph"')
    assert [event["name"] for event in read_timeline(path)] == ["thread_name", "gen"]
    time.sleep(0.005)
    with Timeline(path).phase("gen"):
        pass
    events = read_timeline(path)
    assert [event["ph"] for event in events] == ["M", "B", "M", "B", "E"]
    assert events[1]["tid"] != events[3]["tid"] == events[4]["tid"]


def test_the_device_is_waited_for_before_each_reading():
    calls: list[str] = []
    timeline = Timeline(synchronize=lambda: calls.append("sync"))
    with timeline.phase("values"):
        calls.append("work")
    assert calls == ["sync", "work", "sync"]


LINE = re.compile(r"work: (\d+)/8 samples in \d+ s, ([\d,]+) tokens/s")


def shown(text):
    matches = [LINE.fullmatch(line) for line in text.getvalue().splitlines()]
    assert None not in matches, text.getvalue()
    return [int(match[1]) for match in matches]


def test_lines_come_while_nothing_is_finished_and_none_after_the_end(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.2)
    text = io.StringIO()
    with Progress("work", 8, done=3, console=Console(file=text, width=20)) as counted:
        time.sleep(0.5)
        waiting = shown(text)
        counted.advance(5, 100)
    ended = shown(text)
    time.sleep(0.3)
    assert 1 <= len(waiting) <= 2 and set(waiting) == {3}
    assert ended[-1] == 8 and len(ended) <= len(waiting) + 2
    assert shown(text) == ended


def test_a_short_piece_of_work_is_one_line_and_a_terminal_shows_a_bar_at_once():
    text, terminal = io.StringIO(), io.StringIO()
    with Progress("work", 8, console=Console(file=text)) as counted:
        for _ in range(8):
            counted.advance(1, 10)
    assert shown(text) == [8]
    with Progress("work", 8, console=Console(file=terminal, force_terminal=True, width=100)):
        first = terminal.getvalue()
    assert "work" in first and "0/8" in first and "0:00:00" in first


def test_an_error_ends_the_lines(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.05)
    text = io.StringIO()
    counted = Progress("work", 8, console=Console(file=text))
    counted.__enter__().advance(2, 10)
    counted.__exit__(RuntimeError, RuntimeError(), None)
    assert shown(text)[-1] == 2
    ended = text.getvalue()
    time.sleep(0.15)
    assert text.getvalue() == ended


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
def sleeper(folder, program=SLEEPER):
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
    begin = f"import threading\nfor _ in range(120):\n    {start}\n"
    many = SLEEPER.replace("offer_stacks(Path", f"{begin}offer_stacks(Path")
    with sleeper(tmp_path, many):
        stacks = ask_stacks(tmp_path)[1]
    assert stacks.count("most recent call first") == 100
    assert "main thread" in stacks.splitlines()[-1]
