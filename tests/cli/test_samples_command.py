"""The command `tandem samples`."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tandem.observability.run import RunFolder
from tests.support.folders import write_run, write_samples


@pytest.fixture
def run(tmp_path: Path) -> str:
    folder = RunFolder(write_run(tmp_path / "run", [0.5, 0.5]))
    write_samples(folder, 1, [0.0, 0.5, 1.0, 0.25, 0.75])
    write_samples(folder, 2, [0.5, 0.0], responses=["bad\x1b[2J\r\n── u9 #9\u202e", "x" * 5000])
    write_samples(folder, 0, [0.125], part="val")
    return str(folder.path)


def heads(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("──")]


def test_the_last_step_unless_told(run, printed):
    out = printed("samples", run)
    assert heads(out) == [
        "── u0 #0 · score 0.5 · acc 0.5 · 2 + 1 tokens · ended by stop · ground truth 7",
        "── u0 #1 · score 0 · acc 0 · 2 + 2 tokens · ended by stop · ground truth 7",
    ]
    assert " | user: q0\n > bad\\x1b[2J\\r\n > ── u9 #9\\u202e\n" in out
    assert out.count(" why:") == 2 and " why: because of\n why: \\x1b[2J0.5\n" in out
    assert "x" * 1001 not in out and "3,000 characters" in out
    assert out.endswith("2 of 2 samples of step 2, mean score 0.25; steps with samples: 2, from 1 to 2\n")
    assert "x" * 5000 in printed("samples", run, "--full")


@pytest.mark.parametrize(
    ("words", "scores"),
    [
        ("--step 1", [0.0, 0.5, 1.0, 0.25]), ("--step 1 --worst --n 3", [0.0, 0.25, 0.5]),
        ("--step 1 --best --n 2", [1.0, 0.75]), ("--step 1 --prompt q1", [1.0, 0.25]),
        ("--step 1 --prompt u2", [0.75]), ("--val", [0.125]),
    ],
)  # fmt: skip
def test_which_ones(run, words, scores, printed):
    shown = heads(printed("samples", run, *words.split()))
    assert [float(head.split("score ")[1].split()[0]) for head in shown] == scores
    rows = [json.loads(line) for line in printed("samples", run, *words.split(), "--json").splitlines()]
    assert [row["score"] for row in rows][: len(scores)] == scores
    assert {"prompt", "response", "extra", "why", "response_tokens"} <= set(rows[0])


@pytest.mark.parametrize(
    ("words", "telling"),
    [
        ("--step 7", "expected: 1, 2"), ("--val --step 1", "no validation samples of this step"),
        ("--prompt q17", "one of 1 prompts, such as u0: user: q0"), ("--worst --best", "exclude each other"),
    ],
)  # fmt: skip
def test_what_is_not_there(run, words, telling, refused):
    assert telling in refused("samples", run, *words.split())


def test_a_run_that_wrote_none(tmp_path, refused):
    err = refused("samples", write_run(tmp_path / "run", [0.5]))
    assert "trainer.samples_freq=-1" in err and "set trainer.samples_freq=1" in err


@pytest.mark.parametrize("lacks", ["scores", "response_text", "response_mask", None])
def test_a_file_that_is_no_file_of_samples(run, lacks, refused):
    path = Path(run) / "samples" / "step_000002.parquet"
    if lacks is None:
        path.write_bytes(path.read_bytes()[:-20])
    else:
        pq.write_table(pq.read_table(path).drop_columns([lacks]), path)
    err = refused("samples", run)
    assert str(path) in err and "cannot be read" in err
    assert lacks is None or f"it has no column {lacks}" in err


def test_who_reads_the_output_may_have_enough(run):
    for _ in range(12):  # larger than a pipe's buffer
        write_samples(RunFolder(run), 3, [0.0] * 40, responses=["x" * 5000] * 40)
    command = f"{sys.executable} -m tandem samples {run} --json | head -c 5"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ('{"ste', "")
