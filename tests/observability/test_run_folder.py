import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import DataError
from tandem.observability.run import RunFolder, read_metrics, read_samples
from tandem.observability.sinks import Generation
from tandem.protocol import Ragged


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


def test_metrics_are_one_valid_json_line_per_step(run):
    run.log_metrics(1, {"reward/mean": 0.25, "actor/loss": math.nan, "actor/kl": -math.inf})
    run.log_metrics(2, {"reward/mean": np.float32(0.5)})
    lines = run.metrics_file.read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 1, "reward/mean": 0.25, "actor/loss": None, "actor/kl": None},
        {"step": 2, "reward/mean": 0.5},
    ]


def test_the_last_line_of_a_step_wins_and_steps_are_in_order(run):
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0)):
        run.log_metrics(step, {"x": value})
    rows = read_metrics(run.metrics_file)
    assert [(row["step"], row["x"]) for row in rows] == [(1, 1.0), (2, 20.0), (3, 3.0)]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(min_value=0, max_value=200), step=st.integers(min_value=-1, max_value=6))
def test_a_crash_at_any_byte_leaves_a_folder_that_resumes(tmp_path_factory, cut, step):
    run = RunFolder(tmp_path_factory.mktemp("run"))
    for number in range(5):
        run.log_metrics(number, {"reward/mean": number / 10})
    whole = run.metrics_file.read_bytes()
    run.metrics_file.write_bytes(whole[:cut])
    survived = whole[:cut].count(b"\n")
    assert [row["step"] for row in read_metrics(run.metrics_file)] == list(range(survived))
    run.trim_after(step)
    run.log_metrics(step + 1, {"reward/mean": 1.0})
    expected = [*range(min(survived, step + 1)), step + 1]
    assert [row["step"] for row in read_metrics(run.metrics_file)] == expected


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"x": 1}', '{"step": "one"}'])
def test_a_damaged_line_in_the_middle_is_named(run, line):
    run.log_metrics(1, {"x": 1.0})
    with run.metrics_file.open("a") as file:
        file.write(line + "\n")
    run.log_metrics(3, {"x": 3.0})
    with pytest.raises(DataError, match="line 2") as caught:
        read_metrics(run.metrics_file)
    assert caught.value.field == str(run.metrics_file)


def test_trimming_drops_later_samples_and_half_written_ones(run):
    for step in (0, 10, 20):
        run.write_samples(step, {"score": [1.0]})
    run.write_samples(20, {"score": [1.0]}, part="val_1")
    (run.samples / "step_000010.partial").write_bytes(b"half")
    run.trim_after(10)
    assert sorted(path.stem for path in run.samples.iterdir()) == ["step_000000", "step_000010"]
    run.trim_after(-1)
    assert list(run.samples.iterdir()) == []


TOKENS = Ragged.from_list([[5, 6, 7], [], [8]], torch.int64)
TURNS = [[{"role": "user", "content": "hi"}], [], [{"role": "user", "content": "ho"}]]
MIXED = [42, "forty-two", [4, 2]]
DICTS = [{"index": 1}, {}, {"split": "ü"}]
COLUMNS = {
    "ragged": (TOKENS, [[5, 6, 7], [], [8]]),
    "log-probs": (TOKENS.with_values(torch.tensor([-0.5, -1, -2, -3])), [[-0.5, -1, -2], [], [-3]]),
    "sliced": (Ragged.from_list([[1.0], [2.0, 3.0], [4.0], []])[1:], [[2.0, 3.0], [4.0], []]),
    "dense": (torch.tensor([0.0, 1.0, 0.5]), [0.0, 1.0, 0.5]),
    "rectangle": (torch.tensor([[1, 2], [3, 4], [5, 6]]), [[1, 2], [3, 4], [5, 6]]),
    "texts": (np.array(["1 + 1 =", "π", ""], dtype=object), ["1 + 1 =", "π", ""]),
    "turns": (TURNS, TURNS),
    "list": ([0, 1, 2], [0, 1, 2]),
}


def test_samples_come_back_as_they_were_written(run):
    table = {name: given for name, (given, _) in COLUMNS.items()} | {"dicts": DICTS, "mixed": MIXED}
    path = run.write_samples(3, table)
    back = read_samples(path)
    for name, rows in (("dicts", DICTS), ("mixed", MIXED)):
        assert [json.loads(text) for text in back.pop(name)] == rows
    assert back == {name: rows for name, (_, rows) in COLUMNS.items()}
    other = run.write_samples(3, {"score": [1.0]}, part="val_0")
    assert (path.name, other.name) == ("step_000003.parquet", "step_000003_val_0.parquet")
    assert read_samples(other) == {"score": [1.0]}


def test_the_first_responses_of_a_validation(run):
    for step, part, texts in ((3, "val", "ab"), (3, "val1", "cd"), (3, "", "t"), (4, "val", "l")):
        messages = [[{"role": "user", "content": f"say {text}"}] for text in texts]
        table = {"messages": messages, "response_text": [*texts], "scores": [0.0, 1.0][: len(texts)]}
        run.write_samples(step, table | {"uid": [*texts]}, part=part)
    wanted = [
        Generation(f"user: say {text}", text, score) for text, score in zip("abc", (0, 1, 0), strict=True)
    ]
    assert run.generations(3, 3) == wanted
    assert [each.response for each in run.generations(3, 9)] == ["a", "b", "c", "d"]
    assert run.generations(7, 1) == []


def test_columns_of_different_lengths_are_refused(run):
    with pytest.raises(DataError) as caught:
        run.write_samples(1, {"score": [1.0], "prompt": ["a", "b"]})
    assert caught.value.got == {"score": 1, "prompt": 2}
    assert list(run.samples.iterdir()) == []


def test_an_earlier_run_is_set_aside_whole_and_other_files_stay(run):
    assert run.set_aside() is None
    (run.path / "model").mkdir()
    for number in range(2):
        run.write_config(f"run: {number}\n")
        run.log_metrics(1, {"x": float(number)})
        run.write_samples(1, {"score": [1.0]})
        (run.checkpoints / "step_000001").mkdir(parents=True)
        run.log("resumed")
        run.log("begun")
        target = run.set_aside()
        assert target == run.path / "earlier" / f"00{number}"
        earlier = RunFolder(target)
        assert read_metrics(earlier.metrics_file) == [{"step": 1, "x": number}]
        assert earlier.config_file.read_text() == f"run: {number}\n"
        assert [path.name for path in earlier.checkpoints.iterdir()] == ["step_000001"]
        log = (earlier.logs / "run.log").read_text().splitlines()
        assert [line.split(" ", 1)[1] for line in log][-2:] == ["resumed", "begun"]
        assert len(list(earlier.samples.iterdir())) == 1
        left = sorted(path.name for path in run.path.iterdir())
        assert left == ["checkpoints", "earlier", "log", "model", "samples"]
        run.log("a new run can begin")
    assert run.set_aside() is None
