import gzip
import json
import os
from typing import Any

import pytest

from tandem.observability.profile import breakdown
from tandem.observability.timers import read_timeline
from tests.support.runs import assert_same

WORDS = "GAE steps=3"
PHASES = {"step", "gen", "generate_sequences", "reward", "values", "adv", "update_critic", "update_actor"}


@pytest.fixture(scope="module")
def profiled(lab):
    return lab.run("profiled", WORDS, "trainer.profile.steps=[2,9] trainer.profile.memory=true")


def _events(path):
    with gzip.open(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def test_the_trace_has_operators_and_the_phases_of_that_step_alone(profiled):
    (path,) = (profiled.folder / "profile").iterdir()
    assert path.name == "step_000002.json.gz"
    events = _events(path)
    named = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert {"controller", "actor rank 0", "critic rank 0", "batch rank 0"} <= named
    begun = [event for event in events if event.get("ph") == "B"]
    assert {event["name"] for event in begun} >= PHASES
    assert [event["name"] for event in begun].count("step") == 1
    assert {event["pid"] for event in begun} == {os.getpid()}
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    update = _span(events, "update_actor")
    inside = {o["name"] for o in operators if update[0] <= o["ts"] and o["ts"] + o["dur"] <= update[1]}
    assert {"aten::embedding", "EmbeddingBackward0"} <= inside
    whole = read_timeline(profiled.folder / "timeline.json")
    assert [event["name"] for event in whole if event["ph"] == "B"].count("step") == 3


def _span(events, name):
    (begin,), (end,) = ([e["ts"] for e in events if e.get("ph") == p and e["name"] == name] for p in "BE")
    return begin, end


def test_a_profile_changes_no_number(lab, profiled):
    plain = lab.run("plain", WORDS)
    assert_same(plain, profiled)
    assert not (plain.folder / "profile").exists()


def test_the_user_hears_where_it_is_and_where_the_time_went(profiled):
    (said,) = (s for s in profiled.said if s.startswith("profile of step 2, 1 process:"))
    assert "CUDA" in said
    assert "not profiled: trainer.profile.steps 9, beyond the last step" in profiled.said
    (table,) = (s for s in profiled.said if s.startswith("mean of 2 steps"))
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[2:]}
    assert list(rows)[-2:] == ["step", "response_length"]
    seconds = [row["timing/step"] for row in profiled.rows if row["step"] in (1, 3)]
    assert float(rows["step"][0]) == pytest.approx(sum(seconds) / 2, abs=1e-6)
    assert rows["step"][1] == "seconds"


def test_the_breakdown_has_the_rows_that_there_are():
    rows = [{"timing/gen": 2.0, "timing/step": 4.0}, {"timing/step": 6.0, "timing/save_checkpoint": 1.0}]
    assert [line.split() for line in breakdown(rows).splitlines()] == [
        ["Metric", "Value", "Unit"],
        ["gen", "2.000000", "seconds"],
        ["step", "5.000000", "seconds"],
        ["save_checkpoint", "1.000000", "seconds"],
    ]


def test_verls_keys_for_it(lab):
    for key in ("global_profiler.steps", "trainer.profile_steps"):
        assert lab.config(f"{key}=[3,4]").trainer.profile.steps == (3, 4)
