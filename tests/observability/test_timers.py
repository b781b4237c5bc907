import json
import time

import pytest

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
    assert 0.04 <= taken["timing/reshard"] <= taken["timing/gen"] < 1.0
    assert taken["timing/adv"] < 0.02
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
