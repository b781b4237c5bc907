import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.viewing import STEPS, Client, viewing, write_viewed

LAST = f"samples/step_{STEPS:06d}.parquet"
GARBAGE = bytes(range(256)) * 40


def write(name: str, content: bytes | str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def add(name: str, content: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        with (run / name).open("a") as file:
            file.write(content)

    return damage


def replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return damage


def half(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[: len(content) // 2])

    return damage


def column(name: str, values: pa.Array | None) -> Callable[[Path], None]:
    """Replace a column in the last file of samples, or remove it if `values` is None."""

    def damage(run: Path) -> None:
        table = pq.read_table(run / LAST)
        place = table.column_names.index(name)
        table = table.remove_column(place) if values is None else table.set_column(place, name, values)
        pq.write_table(table, run / LAST)

    return damage


def broken_text() -> pa.Array:
    return pa.array([b"\xff\xfe broken"] * 8).view(pa.string())


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{{', '.join(f'k{j}: *{chr(97 + i)}' for j in range(10))}}}\n"
    for i in range(8)
)
ROW = '{"step": 7, "reward/mean": '

# Damage: (how it is made, where the message is, a part of the message). "" means that there is no message.
CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "half a line of metrics": (add("metrics.jsonl", ROW), "", ""),
    "binary metrics": (write("metrics.jsonl", GARBAGE), "state", "metrics.jsonl"),
    "no metrics yet": (write("metrics.jsonl", ""), "", ""),
    "metrics are a folder": (replace("metrics.jsonl", Path.mkdir), "state", "metrics.jsonl"),
    "metrics are a pipe": (replace("metrics.jsonl", os.mkfifo), "state", "metrics.jsonl"),
    "a metric nested without end": (
        add("metrics.jsonl", f"{ROW}{'[' * 200_000}\n"),
        "state",
        "metrics.jsonl",
    ),
    "a metric that is a text": (add("metrics.jsonl", f'{ROW}"much"}}\n'), "", ""),
    "a metric beyond all numbers": (add("metrics.jsonl", f"{ROW}1e999}}\n"), "", ""),
    "a metric of many digits": (add("metrics.jsonl", f"{ROW}{'9' * 4000}}}\n"), "", ""),
    "a step that is none": (add("metrics.jsonl", '{"step": "x"}\n'), "state", "line 7"),
    "half a line of events": (half("events.jsonl"), "", ""),
    "events of no kind": (add("events.jsonl", "[]\n"), "state", "events.jsonl"),
    "a later version": (add("events.jsonl", '{"event": "start", "format": 2}\n'), "state", "format 2"),
    "a start without its fields": (add("events.jsonl", '{"event": "start"}\n'), "state", "total_steps"),
    "no config": (replace("config.yaml", lambda path: None), "", ""),
    "a config that is no YAML": (write("config.yaml", "a: [\n"), "config", "config.yaml"),
    "a config of binary": (write("config.yaml", GARBAGE), "config", "config.yaml"),
    "a config that is a list": (write("config.yaml", "- a\n- b\n"), "config", "config.yaml"),
    "a config that grows without end": (write("config.yaml", BOMB), "config", "config.yaml"),
    "a config nested without end": (write("config.yaml", "[" * 100_000), "config", "config.yaml"),
    "a config that is a pipe": (replace("config.yaml", os.mkfifo), "config", "config.yaml"),
    "half a file of samples": (half(LAST), "damage", "ArrowInvalid"),
    "an empty file of samples": (write(LAST, b""), "damage", "ArrowInvalid"),
    "samples that are no parquet": (write(LAST, GARBAGE), "damage", "ArrowInvalid"),
    "samples of another table": (column("scores", None), "damage", "missing scores"),
    "scores that are texts": (column("scores", pa.array(["high"] * 8)), "damage", "ArrowInvalid"),
    "responses that are no text": (column("response_text", broken_text()), "damage", "UTF8"),
    "a mask that is no list": (column("response_mask", pa.array([True] * 8)), "damage", "AttributeError"),
    "no samples in the file": (lambda run: _no_rows(run / LAST), "", ""),
    "samples are a file": (replace("samples", lambda path: path.write_text("x")), "", ""),
    "a pipe among the samples": (replace(LAST, os.mkfifo), "", ""),
    "a link to itself among the samples": (replace(LAST, lambda path: path.symlink_to(path)), "", ""),
    "a link to nothing among the samples": (replace(LAST, lambda path: path.symlink_to("/no")), "", ""),
    "prompts that are half JSON": (
        column("messages", pa.array(['[{"role":'] * 8)),
        "damage",
        "JSONDecodeError",
    ),
    "reasons that are no JSON": (column("reward_extra", pa.array(["{"] * 8)), "", ""),
    "a timeline of binary": (add("timeline.json", GARBAGE.decode("latin-1")), "time", "Error"),
    "a timeline of one long line": (add("timeline.json", "x" * (3 << 20) + "\n"), "time", "longer than"),
    "a timeline of no events": (write("timeline.json", "[\n[],\n"), "time", "Error"),
    "ends without begins": (write("timeline.json", '[\n{"ph": "E", "tid": 1, "ts": 1},\n'), "", ""),
    "half a timeline": (half("timeline.json"), "", ""),
    "no timeline": (replace("timeline.json", lambda path: None), "", ""),
    "a manifest that is cut": (half("checkpoints/step_000004/manifest.json"), "checkpoint", "manifest.json"),
    "a log of binary": (write("log/run.log", GARBAGE), "", ""),
    "a tokenizer that is none": (write("model/tokenizer.json", "{"), "", ""),
}


def _no_rows(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 0), path)


def said_by(client: Client, run: Path) -> dict[str, str]:
    """Return the messages of every route about a run. No route fails, whatever the folder contains."""
    answers = {
        name: client.get(f"api/{name}?run={run}{more}")
        for name, more in {
            "config": "",
            "metrics": "&names=reward/mean",
            "events": "",
            "samples": "&text=answer",
            "sample": "&id=step_000001:0",
            "history": "&prompt=0",
            "time": "",
            "export": "&step=1",
        }.items()
    }
    assert {status for status, _ in answers.values()} <= {200, 400}, answers
    listed = next(each for each in client.ask("runs") if each["run"] == str(run))
    events = json.loads(answers["events"][1])
    return {
        "state": listed.get("error", ""),
        "damage": " ".join(json.loads(answers["samples"][1]).get("damage", {}).values()),
        "checkpoint": " ".join(each.get("damage", "") for each in events.get("checkpoints", [])),
        **{name: json.loads(answers[name][1]).get("error", "") for name in ("config", "metrics", "time")},
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_viewed(tmp_path_factory.mktemp("whole") / "run")


def test_there_are_twenty_damaged_folders():
    assert len(CASES) >= 20


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
