import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.device.rates import H100
from benchmarks.device.report import Report, Row, Setting, Skipped, measure
from tests.support.warm import run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_phase_runs_at_the_smallest_shapes(tmp_path):
    words = [sys.executable, "benchmarks/gpu.py", "--tiny", "--device", "cpu", "--deadline", "240"]
    done = run([*words, "--out", tmp_path], cwd=ROOT, timeout=280, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{phase}.json" for phase in gpu.PHASES} | {"table.md", "log.txt"}
    table = (tmp_path / "table.md").read_text()
    for phase in gpu.PHASES:
        report = json.loads((tmp_path / f"{phase}.json").read_text())
        assert report["about"]["finished"] and report["running"] is None
        assert report["about"]["rates"]["copy"] > 0 and report["about"]["rates_at_end"]["product"] > 0
        assert report["rows"]
        for row in report["rows"]:
            assert row.get("value", 1) >= 0 and "error" not in row
            assert f"| {row['name']} |" in table


def setting(folder: Path, seconds: float = 60) -> Setting:
    return Setting(torch.device("cpu"), True, H100, folder, time.monotonic() + seconds)


@pytest.mark.slow
def test_what_fails_or_has_no_time_is_a_row_and_the_next_goes_on(tmp_path):
    def fails(_: Setting) -> dict[str, Any]:
        raise torch.OutOfMemoryError("16 GiB too few")

    def cannot(_: Setting) -> dict[str, Any]:
        raise Skipped("not installed")

    rows = [
        Row("fails", fails, 1),
        Row("cannot", cannot, 1),
        Row("long", lambda _: {"value": 1.0}, 100),
        Row("a rate", lambda _: {"value": 50.0}, 1, bound=lambda _: 200.0),
        Row("seconds", lambda _: {"value": 4.0}, 1, "s", lambda _: 1.0),
    ]
    report = Report(tmp_path / "phase.json")
    measure(rows, setting(tmp_path), report)
    held = {row["name"]: row for row in Report.at(report.path).rows}
    assert "16 GiB too few" in held["fails"]["error"]
    assert held["fails"]["message"] == "OutOfMemoryError: 16 GiB too few"
    assert held["cannot"]["skipped"] == "not installed"
    assert "100" in held["long"]["skipped"] and "value" not in held["long"]
    assert held["a rate"]["share"] == 0.25 and held["seconds"]["share"] == 0.25
    assert not list(tmp_path.glob("*.part"))


def test_rows_that_are_there_are_not_measured_again(tmp_path):
    report = Report(tmp_path / "phase.json")
    measure([Row("one", lambda _: {"value": 1.0}, 1)], setting(tmp_path), report)
    again = Report.at(report.path)
    measure([Row(name, lambda _: {"value": 2.0}, 1) for name in ("one", "two")], setting(tmp_path), again)
    assert [(row["name"], row["value"]) for row in again.rows] == [("one", 1.0), ("two", 2.0)]


def options(out: Path, deadline: float) -> argparse.Namespace:
    return argparse.Namespace(
        phase=["decode"], out=out, device="cpu", tiny=True, deadline=deadline, child=None
    )


def dying(_: Setting) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hanging(_: Setting) -> dict[str, Any]:
    time.sleep(600)
    return {}


class Rows:
    def __init__(self, *rows: Row) -> None:
        self._rows = list(rows)

    def rows(self, _: Setting) -> list[Row]:
        return self._rows


def with_row(row: Row) -> SimpleNamespace:
    """Return a phase with this row between two others."""
    before, after = (Row(name, lambda _: {"value": 1.0}, 1) for name in ("before", "after"))
    return SimpleNamespace(rows=lambda _: [before, row, after])


@pytest.mark.slow
def test_a_process_that_dies_costs_its_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "module", lambda _: with_row(Row("dies", dying, 1)))
    assert gpu.run_all(options(tmp_path, deadline=120)) == 1
    report = Report.at(tmp_path / "decode.json")
    assert [row["name"] for row in report.rows] == ["before", "dies", "after"]
    assert "-9" in report.rows[1]["error"] and report.rows[2]["value"] == 1
    assert "errors:\ndecode: dies" in capsys.readouterr().out


@pytest.mark.slow  # waits for the whole limit, which must be long enough to start Python on a busy machine
def test_a_phase_over_its_limit_keeps_what_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "module", lambda _: with_row(Row("hangs", hanging, 1)))
    monkeypatch.setattr(gpu, "measure_rates", lambda *_, **__: H100)
    monkeypatch.setattr(gpu, "PHASES", {"decode": ("decode", 30)})
    began = time.monotonic()
    assert gpu.run_all(options(tmp_path, deadline=250)) == 1
    assert time.monotonic() - began < 200
    report = Report.at(tmp_path / "decode.json")
    assert [row["name"] for row in report.rows] == ["before", "hangs"]
    assert report.rows[0]["value"] == 1 and "ran longer than" in report.rows[1]["error"]
    assert "| before | 1 tokens/s |" in (tmp_path / "table.md").read_text()


def test_a_phase_without_time_is_left_out_and_said_so(tmp_path):
    assert gpu.run_all(options(tmp_path, deadline=gpu.END_S)) == 0
    report = Report.at(tmp_path / "decode.json")
    assert report.rows == [] and "too few to start" in report.about["notes"][0]
