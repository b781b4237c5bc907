"""Experiment trackers, offline, each where its package is installed: what was logged is read back."""

import json
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import math, sys
from pathlib import Path
from tandem.observability.sinks import RunInfo, Sinks

info = RunInfo("tandem-test", "tracker", Path(sys.argv[2]), total_steps=2, config={"trainer": {"seed": 3}})
sinks = Sinks([sys.argv[1]], info, report=sys.exit)
sinks.log(0, {"val/accuracy": 0.25})
sinks.log(1, {"val/accuracy": 0.5, "actor/loss": math.nan})
sinks.close()
"""


def _log(name: str, folder: Path, **environment: str) -> None:
    """Logs two steps in a process of its own, whose home is `folder`."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(folder)],
        env=os.environ | {"HOME": str(folder)} | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_wandb(tmp_path: Path) -> None:
    _log("wandb", tmp_path, WANDB_MODE="offline")
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert log.read_bytes().count(b"val/accuracy") >= 2


def test_mlflow(tmp_path: Path) -> None:
    _log("mlflow", tmp_path)
    with sqlite3.connect(tmp_path / "mlflow" / "mlflow.db") as database:
        rows = database.execute("select step, value from metrics where key = 'val/accuracy' order by step")
        assert rows.fetchall() == [(0, 0.25), (1, 0.5)]
        assert database.execute("select key, value from params").fetchall() == [("trainer.seed", "3")]
        assert database.execute("select name, status from runs").fetchall() == [("tracker", "FINISHED")]


def test_swanlab(tmp_path: Path) -> None:
    _log("swanlab", tmp_path, SWANLAB_MODE="offline")
    (log,) = tmp_path.glob("swanlab/run-*/*.swanlab")
    assert log.read_bytes().count(b"val/accuracy") >= 2


def test_clearml(tmp_path: Path) -> None:
    _log("clearml", tmp_path, CLEARML_OFFLINE_MODE="1")
    (log,) = tmp_path.glob(".clearml/cache/offline/*/metrics.jsonl")
    rows = [(row["metric"], row["variant"], row["iter"], row["value"]) for row in json.loads(log.read_text())]
    # ClearML would record a NaN as 0, so it is not sent one.
    assert rows == [("val", "accuracy", 0, 0.25), ("val", "accuracy", 1, 0.5)]


def test_trackio(tmp_path: Path) -> None:
    _log("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "tandem-test.db") as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(text)["val/accuracy"]) for step, text in rows] == [(0, 0.25), (1, 0.5)]
