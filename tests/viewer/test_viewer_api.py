import csv
import io
import json
import math

import numpy as np
import pytest

from tandem.observability.reading import Run
from tandem.observability.run import RunFolder
from tandem.viewer.index import SampleIndex
from tests.support.viewing import (
    GROUP,
    PROMPTS,
    STEPS,
    TOKENS,
    await_samples,
    sample_table,
    viewing,
    write_viewed,
    write_viewed_step,
)

COUNT = PROMPTS * GROUP


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_viewed(tmp_path_factory.mktemp("viewed") / "a")


@pytest.fixture(scope="module")
def client(run):
    with viewing(run) as found:
        yield found


def test_runs_are_listed_with_their_state(client, run):
    (found,) = client.ask("runs")
    assert (found["run"], found["state"], found["steps"], found["total"]) == (str(run), "finished", 6, 6)
    assert (found["metric"], found["last"], found["algorithm"]) == ("reward/mean", 0.6, "grpo")
    assert (found["files"], found["indexed"]) == (STEPS, STEPS)


def test_curves_are_those_of_the_run_and_communication_is_derived(client, run):
    found = client.ask("metrics", run=run, names="reward/mean,perf/communication_share,no/such")
    assert found["curves"] == {
        "reward/mean": [[1, 2, 3, 4, 5, 6], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]],
        "perf/communication_share": [[1, 2, 3, 4, 5, 6], [0.25] * 6],
    }
    assert "actor/entropy" in found["names"] and "step" not in found["names"]


def test_a_long_curve_keeps_the_extremes_of_each_stretch(tmp_path):
    folder = RunFolder(tmp_path / "long")
    values = [math.sin(step) for step in range(10_000)]
    values[4321] = 50.0
    rows = (json.dumps({"step": step, "actor/kl": value}) for step, value in enumerate(values))
    folder.metrics_file.write_text("".join(f"{row}\n" for row in rows))
    with viewing(folder.path) as client:
        steps, shown = client.ask("metrics", run=folder.path, names="actor/kl")["curves"]["actor/kl"]
    assert len(steps) <= 4000
    assert steps == sorted(steps)
    assert (max(shown), steps[shown.index(50.0)]) == (50.0, 4321)
    assert min(shown) == pytest.approx(min(values), 1e-5)


FILTERS = [
    ({}, lambda row: True),
    ({"step": "2..4"}, lambda row: 2 <= row["step"] <= 4),
    ({"step": "3"}, lambda row: row["step"] == 3),
    ({"score": "0.35.."}, lambda row: row["score"] > 0.35),
    ({"score": "..0.35", "finish": "stop"}, lambda r: r["score"] < 0.35 and r["finish_reason"] == "stop"),
    ({"source": "words"}, lambda row: row["data_source"] == "words"),
    ({"length": "6..6"}, lambda row: False),
    ({"text": "aNSWER 3 of"}, lambda row: "Answer 3 of" in row["response"]),
    ({"text": "what is 1"}, lambda row: "what is 1" in row["prompt"]),
    ({"text": "answer 3", "source": "sums", "step": "6"}, lambda r: r["response"] == "Answer 3 of step 6"),
    ({"kind": "val"}, lambda row: False),
]


@pytest.mark.parametrize(("query", "wanted"), FILTERS, ids=lambda it: str(it) if isinstance(it, dict) else "")
def test_filters_find_what_a_plain_loop_finds(client, run, query, wanted):
    rows = [row for step in range(1, STEPS + 1) for row in Run(run).samples(step)]
    expected = sum(map(wanted, rows))
    found = client.ask("samples", run=run, limit=200, **query)
    assert (found["total"], found["matched"], len(found["rows"])) == (len(rows), expected, expected)
    if not query.keys() & {"score", "text", "source", "finish", "kind"}:
        assert sum(found["histograms"]["score"]["counts"]) == expected


def test_a_histogram_counts_what_all_other_filters_leave(client, run):
    found = client.ask("samples", run=run, score="0.15..0.25", source="sums")["histograms"]
    counts, edges = found["score"]["counts"], found["score"]["edges"]
    scores = np.repeat(np.arange(1, STEPS + 1, dtype=np.float32) / 10, GROUP)
    assert counts == np.histogram(scores, bins=len(counts), range=(edges[0], edges[-1]))[0].tolist()
    assert found["step"] == {"edges": [1, 2, 3, 4, 5, 6, 7], "counts": [0, GROUP, 0, 0, 0, 0]}


def test_samples_are_sorted_and_paged(client, run):
    for direction in ("up", "down"):
        down = client.ask("samples", run=run, sort="score", direction=direction, limit=200)["rows"]
        scores = [row["score"] for row in down]
        assert scores == sorted(scores, reverse=direction == "down")
    assert client.ask("samples", run=run, sort="score", offset=5, limit=3)["rows"] == down[5:8]
    newest = client.ask("samples", run=run, limit=1)["rows"][0]
    assert (newest["id"], newest["step"]) == ("step_000006:7", 6)


def test_a_sample_has_its_turns_tokens_and_group(client, run):
    found = client.ask("sample", run=run, id="step_000003:1")
    assert found["turns"] == [{"role": "user", "text": "what is 0", "more": ""}]
    assert found["response"] == "Answer 1 of step 3"
    assert (found["facts"]["reward_why"], found["facts"]["ground_truth"]) == ("answer 7, expected 8", "8")
    texts = ["what", "is", "seven", "answer", "call", "result", "seven", "end"]
    assert found["tokens"] == {"start": 0, "total": len(TOKENS), "ids": TOKENS, "texts": texts}
    answered = [("assistant", "seven answer call"), ("tool", "result"), ("assistant", "seven end")]
    assert [(turn["role"], turn["text"]) for turn in found["answered"]] == answered
    columns = found["columns"]
    assert columns["advantages"] == [0, 0, 1.5, -1.5, 0.5, 0, None, 2]
    assert columns["difference"] == pytest.approx([0.5] * 8, abs=1e-6)
    assert columns["ratio"] == pytest.approx([math.exp(0.5)] * 8, abs=1e-5)
    assert columns["policy_version"] == [0, 0, 3, 3, 3, 3, 3, 3]
    assert list(found["lacking"]) == ["entropy"]
    assert [row["id"] for row in found["group"]] == [f"step_000003:{row}" for row in range(GROUP)]
    window = client.ask("sample", run=run, id="step_000003:1", start=6)
    assert (window["tokens"]["ids"], window["columns"]["advantages"]) == (TOKENS[6:], [None, 2])


def test_a_group_ends_at_its_file(tmp_path):
    """In validation, a prompt has the same uid at every step."""
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.write_samples(step, sample_table(1))
    index = SampleIndex(tmp_path)
    for path in index.pending():
        index.read(path)
    assert index.group(COUNT + 1).tolist() == [*range(COUNT, COUNT + GROUP)]


def test_a_prompt_is_followed_over_the_run(client, run):
    prompt = client.ask("sample", run=run, id="step_000003:1")["prompt"]
    found = client.ask("history", run=run, prompt=prompt)
    points = [[step, step / 10] for step in range(1, STEPS + 1) for _ in range(GROUP)]
    assert [[step, round(score, 6)] for step, score in found["points"]] == points
    assert {row["asked"] for row in found["rows"]} == {"user: what is 0"}


def test_an_export_has_what_is_selected_whole(client, run):
    query = f"api/export?run={run}&step=2..3&source=words"
    expected = [row for step in (2, 3) for row in Run(run).samples(step) if row["data_source"] == "words"]
    status, (body, headers) = client.get(query, whole=True)
    assert (status, headers["Content-Disposition"]) == (200, 'attachment; filename="samples.jsonl"')
    assert [json.loads(line) for line in body.decode().splitlines()] == expected
    table = list(csv.DictReader(io.StringIO(client.get(f"{query}&format=csv")[1].decode())))
    wanted = [(row["response"], row["score"]) for row in expected]
    assert [(row["response"], float(row["score"])) for row in table] == wanted


def test_a_steps_time_and_what_waited_for_what(client, run):
    found = client.ask("time", run=run, step=2)
    assert (found["steps"], found["step"], found["seconds"]) == ([1, 2, 3, 4, 5, 6], 2, pytest.approx(2))
    updates = [[f"actor rank {rank}", "update_actor"] for rank in (0, 1)]
    assert [span[:2] for span in found["spans"] if span[2] == pytest.approx(1)] == updates
    (wait,) = found["waits"]
    assert (wait["track"], wait["other"], wait["phase"]) == ("actor rank 0", "actor rank 1", "gen")
    assert (wait["end"] - wait["start"], wait["share"]) == (pytest.approx(0.5), pytest.approx(1))
    assert found["lengths"] == [5] * COUNT
    assert client.ask("time", run=run)["step"] == STEPS


def test_events_checkpoints_the_config_and_what_the_run_said(client, run):
    found = client.ask("events", run=run)
    assert [event["event"] for event in found["events"]] == ["start", "warning", "warning", "start", "end"]
    assert found["checkpoints"] == [{"step": 4, "digest": "0123456789abcdef", "files": 2}]
    assert "a worker was lost" in found["log"]
    assert (found["failure"], found["damage"]) == ("", {})
    config = client.ask("config", run=run)
    assert (config["trainer.samples_freq"], config["actor_rollout_ref.model.path"]) == (1, f"{run}/model")


REFUSED = [
    ("samples", {"score": "a..b"}, "LOW..HIGH"),
    ("samples", {"offset": "-1"}, "whole number"),
    ("samples", {"sort": "../etc"}, "step, score, length, order"),
    ("sample", {"id": "step_000003:99"}, "no such sample"),
    ("sample", {"id": "../../config:0"}, "no such sample"),
    ("time", {"step": "77"}, "no such step"),
    ("metrics", {"run": "/etc"}, "no such run"),
]


@pytest.mark.parametrize(("name", "query", "said"), REFUSED)
def test_what_cannot_be_answered_is_refused_by_name(client, run, name, query, said):
    assert said in client.ask(name, 400, **{"run": run, **query})["error"]


def test_a_run_is_seen_while_it_is_written(tmp_path):
    path = write_viewed(tmp_path / "alive", steps=2)
    with viewing(tmp_path) as client:
        before = client.ask("runs")[0]["stamp"]
        assert client.ask("samples", run=path, text="answer 3")["matched"] == 2
        folder = RunFolder(path)
        for step in (3, 4):
            write_viewed_step(folder, step)
            (folder.samples / f"step_{step + 1:06d}.partial").write_bytes(b"half")
            await_samples(client, str(path), files=step)
            assert client.ask("samples", run=path, text="answer 3")["matched"] == step
            curves = client.ask("metrics", run=path, names="reward/mean")["curves"]
            assert curves["reward/mean"][0][-1] == step
        assert client.ask("runs")[0]["stamp"] != before
        folder.trim_after(1)  # as a resume does
        write_viewed_step(folder, 2)
        await_samples(client, str(path))
        assert client.ask("samples", run=path)["total"] == 2 * COUNT


def test_what_is_not_kept_in_memory_is_read_for_each_search(run, monkeypatch):
    index = SampleIndex(run)
    monkeypatch.setattr("tandem.viewer.index.TEXT_BYTES", 0)
    for path in index.pending():
        index.read(path)
    assert all(part.texts is None for part in index.parts)
    assert index.containing("answer 3").sum() == STEPS
    assert index.excerpts(np.array([9]), 8) == ["Answer 1"]
