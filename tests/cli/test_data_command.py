"""`tandem data convert`, `show`, `split` and `dedupe`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tandem.cli.main import main

Rows = list[dict[str, Any]]
BOXED = "\n\nPut the final answer in \\boxed{}."


def write(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path) -> Rows:
    if path.suffix == ".parquet":
        found: Rows = pq.read_table(path).to_pylist()
        return found
    return [json.loads(line) for line in path.read_text().splitlines()]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def scored(source: str, prompt: str, truth: Any, **extra: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [turn("user", prompt)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 0, **extra},
    }


SUM = {"question": "How much?", "answer": "1,000 and 5.\n#### 1,005"}
TALK = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
SAID = [turn("user", "hi"), turn("assistant", "hello")]
HH = "\n\nHuman: hi\n\nAssistant: "
FORMATS: list[tuple[str, list[str], dict[str, Any], dict[str, Any]]] = [
    # (format, further words, a row, the row it becomes)
    (
        "gsm8k",
        [],
        SUM,
        scored("openai/gsm8k", 'How much?\n\nGive the final number after "####".', "1005", **SUM),
    ),
    (
        "math",
        [],
        {"problem": "x?", "solution": r"so \boxed{\frac{1}{2}}.", "level": "Level 1", "type": "Algebra"},
        scored(
            "DigitalLearningGmbH/MATH-lighteval",
            "x?" + BOXED,
            r"\frac{1}{2}",
            level="Level 1",
            type="Algebra",
        ),
    ),
    (
        "math",
        ["--source", "HuggingFaceH4/MATH-500"],
        {"problem": "x?", "solution": "no box", "answer": "3", "subject": "Algebra", "level": 2},
        scored("HuggingFaceH4/MATH-500", "x?" + BOXED, "3", level=2, subject="Algebra"),
    ),
    (
        "deepmath",
        ["--instruction", ""],
        {
            "question": "x?",
            "final_answer": "3",
            "difficulty": 4.5,
            "topic": "Limits",
            "r1_solution_1": "long",
        },
        scored("MATH", "x?", "3", difficulty=4.5, topic="Limits"),
    ),
    (
        "dapo",
        [],
        {
            "data_source": "math_dapo",
            "prompt": [turn("user", "x?")],
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a"},
        },
        {**scored("math_dapo", "x?", "34"), "extra_info": {"index": "9a"}},
    ),
    (
        "table",
        ["--columns", "prompt=q,answer=a", "--source", "arithmetic", "--instruction", "Think."],
        {"q": "1+1=", "a": 2, "from": "book"},
        scored("arithmetic", "1+1=\n\nThink.", "2", **{"from": "book"}),
    ),
    (
        "sharegpt",
        [],
        {"id": 1, "system": "be kind", "conversations": TALK},
        {"messages": [turn("system", "be kind"), *SAID]},
    ),
    (
        "alpaca",
        [],
        {"instruction": "Add.", "input": "1 1", "output": "2"},
        {"messages": [turn("user", "Add.\n\n1 1"), turn("assistant", "2")]},
    ),
    (
        "preference",
        [],
        {"prompt": "hi", "chosen": "hello", "rejected": "no"},
        {"chosen": SAID, "rejected": [SAID[0], turn("assistant", "no")]},
    ),
    (
        "preference",
        ["--columns", "margin=by"],
        {"chosen": HH + "hello", "rejected": HH + "no", "by": 2},
        {"chosen": SAID, "rejected": [SAID[0], turn("assistant", "no")], "margin": 2.0},
    ),
    (
        "preference",
        [],
        {"prompt": SAID[:1], "chosen": SAID[1:], "rejected": [SAID[0], turn("assistant", "no")]},
        {"chosen": SAID, "rejected": [SAID[0], turn("assistant", "no")]},
    ),
]
READERS = {"sharegpt": ["--sft"], "alpaca": ["--sft"], "preference": ["--rm"]}


@pytest.mark.parametrize(("form", "words", "row", "becomes"), FORMATS)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_format_becomes_rows_that_train(
    form: str,
    words: list[str],
    row: dict[str, Any],
    becomes: dict[str, Any],
    suffix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / f"out{suffix}"
    told = [] if suffix == ".jsonl" else ["--from", form]
    assert main(["data", "convert", write(tmp_path / "in.jsonl", [row]), str(out), *told, *words]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("wrote" if told else f"the columns are those of {form}; wrote") and "1 rows" in said
    )
    assert read(out) == [becomes]
    assert main(["data", "validate", str(out), *READERS.get(form, [])]) == 0


def test_rows_that_cannot_be_converted_are_named_or_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [SUM, {**SUM, "answer": "5"}, {**SUM, "answer": "#### five"}, {**SUM, "question": " "}, SUM]
    words = ["data", "convert", write(tmp_path / "in.jsonl", rows), str(tmp_path / "out.parquet")]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "3 row(s) that cannot be converted from gsm8k" in said
    assert "row 1: no answer\n" in said and "row 3: prompt: nothing but white space\n" in said
    assert "row 2: data_source 'openai/gsm8k': the reward function" in said
    assert not (tmp_path / "out.parquet").exists()
    assert main([*words, "--skip"]) == 0
    assert "2 rows for `tandem train`, 3 left out" in capsys.readouterr().out
    assert [row["extra_info"]["index"] for row in read(tmp_path / "out.parquet")] == [0, 4]
    assert main([*words, "--skip"]) == 1
    assert "is there already" in capsys.readouterr().err
    assert main([*words, "--skip", "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("row", "words", "message"),
    [
        ({"a": 1}, [], "of no known format by its columns"),
        (SUM, ["--from", "gsm9k"], "expected: dapo, sharegpt"),
        (SUM, ["--from", "math"], "missing column 'problem' and 'solution'"),
        (SUM, ["--columns", "question"], "expected: NAME=YOURS"),
        (SUM, ["--columns", "question=frage"], "missing column 'frage'"),
        ({"prompt": "1", "answer": "2"}, [], "no data_source, which chooses the reward"),
        ({"conversations": TALK[1:]}, [], "the assistant speaks first"),
        ({"conversations": [*TALK, {"from": "narrator", "value": "x"}]}, [], "'narrator' is none of"),
        ({"conversations": [*TALK, {"from": "human", "value": None}]}, [], "'content' is null"),
        ({"conversations": "hi"}, [], "not a list of turns"),
        ({"instruction": "", "output": "x"}, [], "no instruction"),
        ({"prompt": "x", "chosen": "same", "rejected": "same"}, [], "chosen and rejected are the same"),
        ({"chosen": "a", "rejected": "b"}, [], "an empty list of messages"),
        (
            {"prompt": None, "reward_model": None},
            ["--source", "s"],
            "prompt: not a list of messages but null",
        ),
    ],
)
def test_what_cannot_be_converted(
    row: dict[str, Any], words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["data", "convert", write(tmp_path / "in.jsonl", [row]), str(out), *words]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()
