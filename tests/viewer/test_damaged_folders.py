import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.viewing import STEPS, viewing, write_viewed

LAST = f"samples/step_{STEPS:06d}.parquet"
GARBAGE = bytes(range(256)) * 40


def write(name, content):
    return lambda run: (run / name).write_bytes(content.encode() if isinstance(content, str) else content)


def add(name, content):
    return lambda run: (run / name).write_text((run / name).read_text() + content)


def replace(name, make):
    def damage(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return damage


def half(name):
    return lambda run: os.truncate(run / name, (run / name).stat().st_size // 2)


def column(name, values):
    """Replace a column in the last file of samples, or remove it if `values` is None."""

    def damage(run: Path) -> None:
        table = pq.read_table(run / LAST)
        place = table.column_names.index(name)
        table = table.remove_column(place) if values is None else table.set_column(place, name, values)
        pq.write_table(table, run / LAST)

    return damage


def no_rows(run):
    pq.write_table(pq.read_table(run / LAST).slice(0, 0), run / LAST)


BROKEN_TEXT = pa.array([b"\xff\xfe broken"] * 8).view(pa.string())
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
for old, new in itertools.pairwise("abcdefghi"):
    BOMB += f"{new}: &{new} {{{', '.join(f'k{j}: *{old}' for j in range(10))}}}\n"
ROW = '{"step": 7, "reward/mean": '

STATE, CONFIG, DAMAGE, TIME, NOWHERE = "state", "config", "damage", "time", ""
MANIFEST = "checkpoints/step_000004/manifest.json"

# Damage: (how it is made, where the message is, a part of the message)
CASES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "half a line of metrics": (add("metrics.jsonl", ROW), NOWHERE, ""),
    "binary metrics": (write("metrics.jsonl", GARBAGE), STATE, "metrics.jsonl"),
    "no metrics yet": (write("metrics.jsonl", ""), NOWHERE, ""),
    "metrics are a folder": (replace("metrics.jsonl", Path.mkdir), STATE, "metrics.jsonl"),
    "metrics are a pipe": (replace("metrics.jsonl", os.mkfifo), STATE, "metrics.jsonl"),
    "a metric nested without end": (add("metrics.jsonl", f"{ROW}{'[' * 200_000}\n"), STATE, "metrics.jsonl"),
    "a metric that is a text": (add("metrics.jsonl", f'{ROW}"much"}}\n'), NOWHERE, ""),
    "a metric beyond all numbers": (add("metrics.jsonl", f"{ROW}1e999}}\n"), NOWHERE, ""),
    "a metric of many digits": (add("metrics.jsonl", f"{ROW}{'9' * 4000}}}\n"), NOWHERE, ""),
    "a step that is none": (add("metrics.jsonl", '{"step": "x"}\n'), STATE, "line 7"),
    "half a line of events": (half("events.jsonl"), NOWHERE, ""),
    "events of no kind": (add("events.jsonl", "[]\n"), STATE, "events.jsonl"),
    "a later version": (add("events.jsonl", '{"event": "start", "format": 2}\n'), STATE, "format 2"),
    "a start without its fields": (add("events.jsonl", '{"event": "start"}\n'), STATE, "total_steps"),
    "no config": (replace("config.yaml", lambda path: None), NOWHERE, ""),
    "a config that is no YAML": (write("config.yaml", "a: [\n"), CONFIG, "config.yaml"),
    "a config of binary": (write("config.yaml", GARBAGE), CONFIG, "config.yaml"),
    "a config that is a list": (write("config.yaml", "- a\n- b\n"), CONFIG, "config.yaml"),
    "a config that grows without end": (write("config.yaml", BOMB), CONFIG, "config.yaml"),
    "a config nested without end": (write("config.yaml", "[" * 100_000), CONFIG, "config.yaml"),
    "a config that is a pipe": (replace("config.yaml", os.mkfifo), CONFIG, "config.yaml"),
    "half a file of samples": (half(LAST), DAMAGE, "ArrowInvalid"),
    "an empty file of samples": (write(LAST, b""), DAMAGE, "ArrowInvalid"),
    "samples that are no parquet": (write(LAST, GARBAGE), DAMAGE, "ArrowInvalid"),
    "samples of another table": (column("scores", None), DAMAGE, "missing scores"),
    "scores that are texts": (column("scores", pa.array(["high"] * 8)), DAMAGE, "ArrowInvalid"),
    "responses that are no text": (column("response_text", BROKEN_TEXT), DAMAGE, "UTF8"),
    "a mask that is no list": (column("response_mask", pa.array([True] * 8)), DAMAGE, "AttributeError"),
    "no samples in the file": (no_rows, NOWHERE, ""),
    "samples are a file": (replace("samples", lambda path: path.write_text("x")), NOWHERE, ""),
    "a pipe among the samples": (replace(LAST, os.mkfifo), NOWHERE, ""),
    "a link to itself among the samples": (replace(LAST, lambda path: path.symlink_to(path)), NOWHERE, ""),
    "a link to nothing among the samples": (replace(LAST, lambda path: path.symlink_to("/no")), NOWHERE, ""),
    "half JSON prompts": (column("messages", pa.array(['[{"role":'] * 8)), DAMAGE, "JSONDecodeError"),
    "reasons that are no JSON": (column("reward_extra", pa.array(["{"] * 8)), NOWHERE, ""),
    "a timeline of binary": (add("timeline.json", GARBAGE.decode("latin-1")), TIME, "Error"),
    "a timeline of one long line": (add("timeline.json", "x" * (3 << 20) + "\n"), TIME, "longer than"),
    "a timeline of no events": (write("timeline.json", "[\n[],\n"), TIME, "Error"),
    "ends without begins": (write("timeline.json", '[\n{"ph": "E", "tid": 1, "ts": 1},\n'), NOWHERE, ""),
    "half a timeline": (half("timeline.json"), NOWHERE, ""),
    "no timeline": (replace("timeline.json", lambda path: None), NOWHERE, ""),
    "a manifest that is cut": (half(MANIFEST), "checkpoint", "manifest.json"),
    "a log of binary": (write("log/run.log", GARBAGE), NOWHERE, ""),
    "a tokenizer that is none": (write("model/tokenizer.json", "{"), NOWHERE, ""),
}


QUERIES = {"config": "", "metrics": "&names=reward/mean", "events": "", "samples": "&text=answer", "time": ""}
QUERIES |= {"sample": "&id=step_000001:0", "history": "&prompt=0", "export": "&step=1"}


def said_by(client, run):
    """Return the messages of every route about a run. No route fails, whatever the folder contains."""
    answers = {name: client.get(f"api/{name}?run={run}{more}") for name, more in QUERIES.items()}
    assert {status for status, _ in answers.values()} <= {200, 400}, answers
    listed = next(each for each in client.ask("runs") if each["run"] == str(run))
    events, samples = (json.loads(answers[name][1]) for name in ("events", "samples"))
    return {
        "state": listed.get("error", ""),
        "damage": " ".join(samples.get("damage", {}).values()),
        "checkpoint": " ".join(each.get("damage", "") for each in events.get("checkpoints", [])),
        **{name: json.loads(answers[name][1]).get("error", "") for name in ("config", "metrics", "time")},
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_viewed(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named_and_does_no_harm(whole, tmp_path, case):
    damage, place, words = CASES[case]
    run = tmp_path / "damaged"
    shutil.copytree(whole, run)
    damage(run)
    with viewing(run, whole) as client:
        said = said_by(client, run)
        assert said_by(client, whole) == dict.fromkeys(said, "")
        assert client.ask("samples", run=whole)["total"] == 8 * STEPS
        if (run / "samples").is_dir():
            assert client.ask("samples", run=run, step=1)["matched"] == 8  # intact samples are shown
    assert words in said[place] if place else not said["state"] + said["damage"] + said["time"], said


def test_a_run_that_goes_away_while_it_is_seen_is_said_to_be_gone(whole, tmp_path):
    run = tmp_path / "runs" / "a"
    shutil.copytree(whole, run)
    with viewing(tmp_path / "runs") as client:
        assert client.ask("samples", run=run)["total"] == 8 * STEPS
        shutil.rmtree(run)
        for name in ("events", "metrics", "samples", "time", "config"):
            assert client.get(f"api/{name}?run={run}")[0] in (200, 400)
        client.server.api._shelf._searched = -100.0
        assert client.ask("runs") == []
        assert "no such run" in client.ask("samples", 400, run=run)["error"]
