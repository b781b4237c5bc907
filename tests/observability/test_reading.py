import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from tandem.errors import DataError
from tandem.observability.lock import ProcessLock
from tandem.observability.reading import Best, Run, bytes_below, find_runs
from tandem.observability.run import RunFolder
from tandem.protocol import Ragged
from tests.support.folders import write_samples

KILLED = """
import os, signal, sys
from pathlib import Path
from tandem.observability.lock import ProcessLock
ProcessLock(Path(sys.argv[1]), "key", print).acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def test_reading_loads_neither_torch_nor_what_reads_samples():
    code = "import sys; from tandem.observability.reading import Run;"
    code += "assert not {'torch', 'pyarrow', 'numpy', 'rich', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_come_as_they_are_written_and_only_what_is_new_is_read(folder):
    run = Run(folder.path)
    assert (run.metrics, run.steps, run.metric, run.best) == ([], 0, None, None)
    folder.log_metrics(0, {"val/accuracy": 0.25})
    folder.log_metrics(1, {"reward/mean": 0.5, "actor/grad_norm": math.nan})
    assert run.metrics[0] == {"step": 0, "val/accuracy": 0.25}
    assert math.isnan(run.metrics[1]["actor/grad_norm"])
    assert run.curve("actor/grad_norm") == []
    whole = folder.metrics_file.read_bytes()
    spoilt = b"?" * (len(whole) - 64) + whole[-64:]  # earlier lines are not read again
    folder.metrics_file.write_bytes(spoilt + b'{"step": 2, "reward/me')
    assert run.steps == 1
    with folder.metrics_file.open("ab") as file:
        file.write(b'an": 0.75}\n')
    assert run.curve("reward/mean") == [(1, 0.5), (2, 0.75)]
    assert run.best == Best(2, "reward/mean", 0.75)


def test_a_resumed_run_is_read_anew_and_the_last_row_of_a_step_counts(folder):
    run = Run(folder.path)
    for step in range(1, 8):
        folder.log_metrics(step, {"reward/mean": step / 10})
    assert run.steps == 7
    folder.trim_after(4)
    assert run.steps == 4
    for step in (5, 6, 7, 8, 6):
        folder.log_metrics(step, {"reward/mean": -step / 10})
    assert run.curve("reward/mean") == [(s, s / 10 if s < 5 else -s / 10) for s in range(1, 9)]
    folder.metrics_file.unlink()
    assert run.metrics == []


def test_the_best_goes_by_the_metric_that_checkpoints_are_kept_by(folder):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 1.0), (4, 2.0)):
        folder.log_metrics(step, {"sft/loss": loss, "val/loss": 10 - loss})
    run = Run(folder.path)
    assert run.best == Best(2, "sft/loss", 1.0)
    folder.write_config("trainer: {keep_best: val/loss, keep_best_mode: min}")
    assert run.best == Best(1, "val/loss", 7.0)
    assert (run.setting("trainer.keep_best"), run.setting("trainer.nothing.there")) == ("val/loss", None)


def test_samples(folder):
    run = Run(folder.path)
    folder.write_config("trainer: {samples_freq: -1}")
    with pytest.raises(DataError, match="has written no samples") as caught:
        run.samples()
    assert "trainer.samples_freq=1" in str(caught.value.remedy)
    write_samples(folder, 3, [0.0, 1.0, 0.5])
    write_samples(folder, 12, [1.0])
    write_samples(folder, 0, [0.25, 0.75], part="val")
    write_samples(folder, 0, [0.125], part="val1")
    (folder.samples / "step_000013.partial").write_bytes(b"half")
    assert (run.sample_steps(), run.sample_steps(val=True)) == ([3, 12], [0])
    rows = run.samples(3)
    assert rows[2] == {
        "step": 3, "uid": "u1", "sample": 0, "data_source": "sums", "ground_truth": "7",
        "finish_reason": "stop", "prompt": "user: q1", "response": "r2", "score": 0.5, "extra": {"acc": 0.5},
        "prompt_tokens": 2, "response_tokens": 3, "why": "because of\n\x1b[2J0.5",
    }  # fmt: skip
    assert [row["response_tokens"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in run.samples()] == [12]
    assert [row["score"] for row in run.samples(val=True)] == [0.25, 0.75, 0.125]
    with_tokens = run.samples(3, tokens=True)[1]
    assert with_tokens["tokens"] == [0, 1, 2, 3]
    assert with_tokens["messages"] == [{"role": "user", "content": "q0"}]
    assert {name: with_tokens[name] for name in rows[1]} == rows[1]
    with pytest.raises(DataError, match="no samples of this step") as caught:
        run.samples(4)
    assert (caught.value.got, caught.value.expected) == (4, "3, 12")


def test_a_response_without_a_token(folder):
    mask = Ragged.from_list([[False, False], [False, True], []], torch.bool)
    table: dict[str, Any] = {"response_mask": mask, "response_text": ["", "a", ""], "scores": [0.0, 1.0, 0.0]}
    folder.write_samples(1, table)
    rows = Run(folder.path).samples()
    assert [(row["prompt_tokens"], row["response_tokens"]) for row in rows] == [(2, 0), (1, 1), (0, 0)]
    assert (rows[0]["prompt"], rows[0]["extra"], rows[0]["uid"]) == ("", {}, None)


def test_states(folder):
    run = Run(folder.path)
    assert run.state == "empty"
    with ProcessLock(folder.path / "run.lock", "key", print):
        assert run.state == "running"
        folder.event("start", step=0, total_steps=3)
        folder.log_metrics(1, {"reward/mean": 0.5})
        assert (run.state, run.total_steps) == ("running", 3)
    assert run.state == "interrupted"
    subprocess.run([sys.executable, "-c", KILLED, str(folder.path / "run.lock")], check=False)
    assert (folder.path / "run.lock").exists()
    assert run.state == "interrupted"
    for how in ("failed", "interrupted", "finished"):
        folder.event("start", step=1, total_steps=9)
        folder.event("end", how=how)
        assert run.state == how
    assert run.total_steps == 9
    (folder.path / "run.lock").write_text(json.dumps({"host": "node7", "pid": 1}))
    assert run.state == "running"


def test_states_of_folders_without_events(tmp_path):
    folder = RunFolder(tmp_path / "run")
    run = Run(folder.path)
    (folder.logs / "failure.txt").write_text("a worker died")
    assert run.state == "failed"
    folder.write_config("trainer: {total_training_steps: 2}")
    folder.log_metrics(1, {"reward/mean": 0.5})
    assert run.state == "interrupted"
    folder.log_metrics(2, {"reward/mean": 0.5})
    assert (run.state, run.total_steps) == ("finished", 2)


def test_runs_are_found_and_their_sizes_told(tmp_path):
    for name in ("b", "a/warm_up", "a/run"):
        RunFolder(tmp_path / name).log_metrics(1, {"reward/mean": 0.5})
    RunFolder(tmp_path / "b").log_metrics(2, {"timing/step": 1.5, "timing/testing": 0.25})
    newest = tmp_path / "b" / "checkpoints" / "step_000002"
    for folder in (newest, newest.with_name("step_000001.tmp")):
        folder.mkdir(parents=True)
    (newest / "weights").write_bytes(b"x" * 1000)
    RunFolder(tmp_path / "b" / "earlier" / "000")
    runs = find_runs(tmp_path)
    assert [str(run.path.relative_to(tmp_path)) for run in runs] == ["a/run", "a/warm_up", "b"]
    assert (runs[2].checkpoints, runs[2].seconds) == ({2: newest}, 1.75)
    assert runs[2].bytes == 1000 + (tmp_path / "b" / "metrics.jsonl").stat().st_size
    assert bytes_below(tmp_path / "nothing") == 0


def test_what_is_no_run_is_said_and_what_is_inside(tmp_path):
    RunFolder(tmp_path / "one")
    with pytest.raises(DataError, match="no run has started") as caught:
        Run(tmp_path)
    assert str(tmp_path / "one") in str(caught.value.expected)
    with pytest.raises(DataError, match="does not exist"):
        Run(tmp_path / "other")
