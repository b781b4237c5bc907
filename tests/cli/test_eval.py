"""`tandem eval`: its figures against values computed by hand, and the continuation of a killed run."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tandem.cli.main import main
from tandem.observability.journal import Journal
from tests.support.killing import kill_half_way
from tests.support.runs import REWARD_HEAD
from tests.support.tiny import make_model, problem, write_rows

ROWS, N = 16, 4
SLOW_REWARD = f"""
import time

{REWARD_HEAD}
    time.sleep(0.02)
    right = len(set(solution_str)) % 3 == 0
    return {{"score": len(set(solution_str)) / 7, "acc": right, "pred": solution_str[:1] or None}}
"""


def responses(folder: Path) -> Path:
    """Return five problems of two kinds, with four responses each."""
    texts = {
        "arithmetic/easy": [["=5", "=5", "=6", "=6"], ["=5", "=5.0", "=5", "=1"]],
        "arithmetic/hard": [["=1", "=1", "=1", "?"], ["=5", "?", "?", "?"], ["=5", "=5", "=5", "=5"]],
    }
    rows = [
        {**problem(2, 3), "data_source": source, "responses": four}
        for source, problems in texts.items()
        for four in problems
    ]
    return write_rows(folder / "responses.parquet", rows)


def report(out: Path, *words: str) -> dict[str, Any]:
    assert main(["eval", f"data.output_path={out}", *words]) == 0
    return json.loads(out.read_text())["sources"]  # type: ignore[no-any-return]


def test_figures_by_hand(tmp_path, capsys):
    """Of 4 responses, 2, 3, 0, 1, 4 are right. Two draws miss all in C(2,2), 0, C(4,2), C(3,2), 0 of 6."""
    out = tmp_path / "report.json"
    sources = report(out, f"data.path={responses(tmp_path)}", "eval.k=[1,2,4]")
    assert {name: (s["problems"], s["responses"]) for name, s in sources.items()} == {
        "arithmetic/easy": (2, 8),
        "arithmetic/hard": (3, 12),
        "overall": (5, 20),
    }
    value = {
        (name, measure): estimate["value"]
        for name, source in sources.items()
        for measure, estimate in source["measures"].items()
    }
    for measure in ("score", "accuracy", "pass@1"):
        assert value["overall", measure] == pytest.approx((2 / 4 + 3 / 4 + 0 + 1 / 4 + 1) / 5)
    assert value["arithmetic/easy", "pass@2"] == pytest.approx((5 / 6 + 1) / 2)
    assert value["arithmetic/hard", "pass@2"] == pytest.approx((0 + 3 / 6 + 1) / 3)
    assert value["overall", "pass@2"] == pytest.approx((5 / 6 + 1 + 0 + 3 / 6 + 1) / 5)
    assert value["overall", "pass@4"] == 4 / 5
    # Four votes: a tie, 5 (5.0 equals 5), 1, the only answer, 5.
    assert value["overall", "maj@4"] == pytest.approx((1 / 2 + 1 + 0 + 1 + 1) / 5)
    # Two votes, first problem: 55, 66, and four ties. Second: three times 55, and three ties. Fourth: the
    # answer is in three of six.
    assert value["overall", "maj@2"] == pytest.approx((3 / 6 + (3 + 1.5) / 6 + 0 + 3 / 6 + 1) / 5)
    # Wilson interval for 4 right of 5.
    whole = sources["overall"]["measures"]["pass@4"]
    assert whole["method"] == "wilson"
    assert (whole["low"], whole["high"]) == pytest.approx((0.375535, 0.963775), abs=1e-6)
    # Bootstrap of two problems, 1/2 and 3/4: at each end, a quarter of the resamples has one problem twice.
    easy = sources["arithmetic/easy"]["measures"]["accuracy"]
    assert (easy["low"], easy["high"], easy["method"]) == (0.5, 0.75, "bootstrap")
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("arithmetic/hard", "pass@4", "0.800", "0.376 … 0.964"))
    scored = pq.read_table(tmp_path / "report.samples.parquet").to_pylist()
    assert scored[1]["answers"] == ["5", "5", "5", "1"] and scored[1]["right"] == [True, True, True, False]
    assert scored[1]["reward_why"][0] == "answer 5, expected 5"
    assert scored[2]["scores"] == [0, 0, 0, 0] and scored[2]["answers"] == ["1", "1", "1", None]


def model_words(folder: Path, problems: int, length: int) -> list[str]:
    """Make a model and data. Return the words of an evaluation of this model."""
    data = write_rows(folder / "in.parquet", [problem(a, 7) for a in range(3, 3 + problems)])
    words = [f"data.path={data}", f"model.path={make_model(folder / 'model')}", "trainer.device=cpu"]
    return [*words, f"data.max_response_length={length}"]


def test_a_model_is_evaluated_as_its_responses_are(tmp_path, printed):
    words = [*model_words(tmp_path, ROWS, 12), f"rollout.n={N}"]
    given = tmp_path / "responses.jsonl"
    printed("generate", f"data.output_path={given}", *words)
    at_once = report(tmp_path / "a.json", *words)
    assert at_once == report(tmp_path / "b.json", f"data.path={given}")
    measures = ["score", "accuracy", "pass@2", "pass@4", "maj@2", "maj@4"]
    assert list(at_once["overall"]["measures"]) == measures
    first = pq.read_table(tmp_path / "a.samples.parquet").to_pylist()
    lines = given.read_text().splitlines()
    assert [json.loads(line)["responses"] for line in lines] == [row["responses"] for row in first]


def test_a_killed_run_goes_on_where_it_was(tmp_path, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text(SLOW_REWARD)
    words = [*model_words(tmp_path, ROWS, 40), f"rollout.n={N}", "rollout.max_num_seqs=2"]
    words += ["rollout.dtype=float64", f"custom_reward_function.path={reward}"]
    undisturbed = report(tmp_path / "whole.json", *words)
    out, scores = tmp_path / "out.json", tmp_path / "out.json.scores.jsonl"
    done = kill_half_way(["eval", f"data.output_path={out}", *words], scores, pieces=ROWS)
    assert ROWS <= done < ROWS * N and not out.exists()
    capsys.readouterr()
    assert report(out, *words) == undisturbed
    assert f"{done} responses are already scored" in capsys.readouterr().err
    samples = [pq.read_table(tmp_path / f"{name}.samples.parquet") for name in ("out", "whole")]
    assert samples[0].equals(samples[1])
    assert not list(tmp_path.glob("out.json.*"))


def test_what_lies_beside_a_report_is_not_replaced_unasked(tmp_path, refused, printed):
    words = ["eval", f"data.path={responses(tmp_path)}", f"data.output_path={tmp_path / 'report.json'}"]
    samples = tmp_path / "report.samples.parquet"
    samples.write_text("mine")
    said = refused(*words)
    assert "already exists" in said and str(samples) in said
    assert samples.read_text() == "mine" and not (tmp_path / "report.json").exists()
    printed(*words, "--overwrite")
    assert len(pq.read_table(samples)) == 5


@pytest.mark.parametrize("kept", ["scores", "responses"])
def test_a_run_killed_at_its_very_end_goes_on(tmp_path, monkeypatch, printed, kept):
    words = ["eval", *model_words(tmp_path, 3, 6), f"data.output_path={tmp_path / 'out.json'}"]
    remove = Journal.remove
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", lambda journal: kept in journal.path.name or remove(journal))
        printed(*words)
    before = (tmp_path / "out.json").read_text()
    printed(*words)
    assert (tmp_path / "out.json").read_text() == before
    assert not list(tmp_path.glob("out.json.*"))


def test_a_reward_that_was_changed_is_noticed(tmp_path, monkeypatch, refused):
    reward, out = tmp_path / "reward.py", tmp_path / "report.json"
    reward.write_text(f"{REWARD_HEAD} return 0.5")
    words = [f"data.path={responses(tmp_path)}", f"custom_reward_function.path={reward}"]
    with monkeypatch.context() as patch:
        patch.setattr("tandem.offline.eval.replace_file", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            report(out, *words)
    reward.write_text(reward.read_text().replace("0.5", "1.0"))
    assert "custom_reward_function.path (content)=" in refused("eval", f"data.output_path={out}", *words)
    measures = report(out, *words, "--overwrite")["overall"]["measures"]
    assert measures["accuracy"]["value"] == 1.0
    assert not [name for name in measures if name.startswith("maj")]  # this reward reads no answers


@pytest.mark.parametrize(
    ("row", "words", "said"),
    [
        ({}, "eval.k=5", "expected: 1 to 4"),
        ({}, "data.response_key=texts", "missing column 'texts'"),
        ({}, "rollout.n=4", "model.path"),
        ({"data_source": "x", "responses": "2"}, "", "no reward function for this data source"),
        ({"responses": []}, "", "row 0: responses is of type list"),
    ],
)
def test_what_it_refuses(tmp_path, refused, row, words, said):
    data = write_rows(tmp_path / "in.parquet", [{**problem(1, 1), "responses": ["2"] * 4, **row}])
    given = [f"data.path={data}", f"data.output_path={tmp_path / 'r.json'}", *words.split()]
    assert said in refused("eval", *given)
