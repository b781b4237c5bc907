import json
import os
import sqlite3
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.config.load import load_train_config
from tandem.observability.run import RunFolder, read_metrics
from tandem.trainer.run import run_ppo
from tests.support.runs import Lab

ROOT = Path(__file__).parents[2]
Left = dict[tuple[str, int], float]
"""The values that a logger stored, by metric and step."""


class Tracked:
    """A run that logged to one tracker, in its own process with the home folder `home`."""

    def __init__(self, lab: Lab, name: str, home: Path, *packages: str, **environment: str) -> None:
        for package in packages:
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        self.folder = home / "run"
        names = {"trainer.project_name": "tandem-test", "trainer.experiment_name": "tracked"}
        keys = {"trainer.test_freq": 1, "trainer.log_val_generations": 2, "trainer.logger": name, **names}
        words = lab.overrides(self.folder, **keys, data__val_files=lab.val)
        if not packages:
            run_ppo(load_train_config(None, words).config, say=print)
            return
        env = os.environ | {"HOME": str(home), "PYTHONPATH": f"{ROOT}{os.pathsep}{home}"} | environment
        command = [sys.executable, "-m", "tandem", "train", *words]
        seen = {"capture_output": True, "text": True, "timeout": 280}
        done = subprocess.run(command, env=env, cwd=home, check=False, **seen)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "switched off" not in done.stdout

    @property
    def metrics(self) -> Left:
        rows = read_metrics(self.folder / "metrics.jsonl")
        assert [row.pop("step") for row in rows] == [0, 1, 2]
        found = [(name, step, value) for step, row in enumerate(rows) for name, value in row.items()]
        return {(name, step): value for name, step, value in found if value is not None}

    def table(self, step: int) -> list[list[Any]]:
        return [[g.prompt, g.response, g.score] for g in RunFolder(self.folder).generations(step, 2)]


def _levels(reader, path, record):
    reader.open(path)
    while (data := reader.scan()) is not None:
        made = record()
        made.ParseFromString(data)
        yield made
    reader.close()


@pytest.mark.parametrize("name", ["wandb", "vemlp_wandb"])
def test_wandb_and_what_speaks_its_api(lab, tmp_path, name):
    """The package of vemlp_wandb is on no public index; a module in its place gives the same API."""
    (tmp_path / "volcengine_ml_platform.py").write_text("import wandb\n\ndef init(ak, sk, region): ...\n")
    account = {name: "x" for name in ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION")}
    run = Tracked(lab, name, tmp_path, "wandb", "swanlab", WANDB_MODE="offline", **account)
    (log,) = tmp_path.glob("**/offline-run-*/run-*.wandb")
    reader = import_module("swanlab.converter.wb.wbdatastore").WBDataStoreReader()
    left: Left = {}
    tables = {}
    for record in _levels(reader, log, import_module("wandb.proto.wandb_internal_pb2").Record):
        values = {tuple(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        step = record.history.step.num
        left |= {(key, step): value for (key, *more), value in values.items() if not more}
        if path := values.get(("val/generations", "path")):
            tables[step] = json.loads((log.parent / "files" / path).read_text())["data"]
    assert {key: left[key] for key in run.metrics} == run.metrics
    assert tables == {step: run.table(step) for step in range(3)}


def test_mlflow(lab, tmp_path):
    run = Tracked(lab, "mlflow", tmp_path, "mlflow")
    with sqlite3.connect(run.folder / "mlflow" / "mlflow.db") as database:
        rows = database.execute("select key, step, value from metrics where not is_nan").fetchall()
        assert {(key, step): value for key, step, value in rows} == run.metrics
        found = dict(database.execute("select key, value from params").fetchall())
        assert found["actor_rollout_ref.rollout.n"] == "3"
        assert database.execute("select name, status from runs").fetchall() == [("tracked", "FINISHED")]
    (table,) = run.folder.glob("mlflow/artifacts/*/artifacts/val/generations.json")
    expected = [[step, *row] for step in range(3) for row in run.table(step)]
    assert json.loads(table.read_text())["data"] == expected
    assert not (tmp_path / "mlruns").exists()


def test_swanlab(lab, tmp_path):
    run = Tracked(lab, "swanlab", tmp_path, "swanlab", SWANLAB_MODE="offline")
    (log,) = run.folder.glob("swanlab/run-*/*.swanlab")
    reader = import_module("swanlab.sdk.internal.core_python.store").DataStoreReader()
    records = list(_levels(reader, log, import_module("swanlab.proto.swanlab.record.v1.record_pb2").Record))
    left = {(r.scalar.key, r.scalar.step): r.scalar.value.number for r in records if r.HasField("scalar")}
    assert {key: left[key] for key in run.metrics} == run.metrics
    files = {r.media.step: r.media.value.items[0].filename for r in records if r.HasField("media")}
    for step, name in files.items():
        (table,) = log.parent.glob(f"media/*/{name}")
        assert all(text in table.read_text() for row in run.table(step) for text in row[:2])
    assert sorted(files) == [0, 1, 2]


def test_clearml(lab, tmp_path):
    run = Tracked(lab, "clearml", tmp_path, "clearml", CLEARML_OFFLINE_MODE="1")
    (log,) = tmp_path.glob(".clearml/cache/offline/*/metrics.jsonl")
    rows = [row for line in log.read_text().splitlines() for row in json.loads(line)]
    left = {(f"{r['metric']}/{r['variant']}", r["iter"]): r["value"] for r in rows if "value" in r}
    assert {key: left[key] for key in run.metrics} == run.metrics
    tables = {r["iter"]: json.loads(r["plot_str"])["data"][0] for r in rows if "plot_str" in r}
    plots = {step: table["cells"]["values"] for step, table in tables.items()}
    assert plots == {s: [list(c) for c in zip(*run.table(s), strict=True)] for s in range(3)}


def test_trackio(lab, tmp_path):
    run = Tracked(lab, "trackio", tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "tandem-test.db") as database:
        rows = [(s, json.loads(t)) for s, t in database.execute("select step, metrics from metrics")]
    left = {(key, step): value for step, values in rows for key, value in values.items()}
    assert {key: left[key] for key in run.metrics} == run.metrics
    for step in range(3):
        table = left["val/generations", step]["_value"]
        assert [list(row.values()) for row in table] == run.table(step)


def test_tensorboard(lab, tmp_path):
    run = Tracked(lab, "tensorboard", tmp_path)
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    left = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    assert {key: left[key] for key in run.metrics} == pytest.approx(run.metrics, rel=1e-6)
    texts = events.Tensors("val/generations/1/text_summary")
    assert [text.step for text in texts] == [0, 1, 2]
    assert run.table(2)[1][1] in texts[2].tensor_proto.string_val[0].decode()
