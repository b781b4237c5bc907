"""`tandem data convert`, `show`, `split` and `dedupe`."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cli.data import ACTIONS
from tandem.data.files import DataFiles, read_files
from tandem.offline.parts import Texts, alike, split
from tests.support.tiny import CHARACTERS, make_tokenizer

Rows = list[dict[str, Any]]
BOXED = "\n\nPut the final answer in \\boxed{}."


def write(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path) -> Rows:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
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
SUMMED = scored("openai/gsm8k", 'How much?\n\nGive the final number after "####".', "1005", **SUM)
TALK = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
SAID = [turn("user", "hi"), turn("assistant", "hello")]
PAIR = {"chosen": SAID, "rejected": [SAID[0], turn("assistant", "no")]}
HH = "\n\nHuman: hi\n\nAssistant: "
HALF, LIGHTEVAL = r"\frac{1}{2}", "DigitalLearningGmbH/MATH-lighteval"
FIRST = {"level": "Level 1", "type": "Algebra"}
LIMITS = {"difficulty": 4.5, "topic": "Limits"}
DAPO = {"data_source": "math_dapo", "prompt": [turn("user", "x?")], "extra_info": {"index": "9a"}}
FORMATS: list[tuple[str, list[str], dict[str, Any], dict[str, Any]]] = [
    # (format, further words, a row, the resulting row)
    ("gsm8k", [], SUM, SUMMED),
    ("math", [], {"problem": "x?", "solution": rf"so \boxed{{{HALF}}}.", **FIRST},
     scored(LIGHTEVAL, "x?" + BOXED, HALF, **FIRST)),
    ("math", ["--source", "HuggingFaceH4/MATH-500"],
     {"problem": "x?", "solution": "no box", "answer": "3", "subject": "Algebra", "level": 2},
     scored("HuggingFaceH4/MATH-500", "x?" + BOXED, "3", level=2, subject="Algebra")),
    ("deepmath", ["--instruction", ""],
     {"question": "x?", "final_answer": "3", **LIMITS, "r1_solution_1": "long"},
     scored("MATH", "x?", "3", **LIMITS)),
    ("dapo", [], {**DAPO, "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}},
     {**scored("math_dapo", "x?", "34"), "extra_info": {"index": "9a"}}),
    ("table", ["--columns", "prompt=q,answer=a", "--source", "arithmetic", "--instruction", "Think."],
     {"q": "1+1=", "a": 2, "from": "book"}, scored("arithmetic", "1+1=\n\nThink.", "2", **{"from": "book"})),
    ("sharegpt", [], {"id": 1, "system": "be kind", "conversations": TALK},
     {"messages": [turn("system", "be kind"), *SAID]}),
    ("alpaca", [], {"instruction": "Add.", "input": "1 1", "output": "2"},
     {"messages": [turn("user", "Add.\n\n1 1"), turn("assistant", "2")]}),
    ("preference", [], {"prompt": "hi", "chosen": "hello", "rejected": "no"}, PAIR),
    ("preference", ["--columns", "margin=by"], {"chosen": HH + "hello", "rejected": HH + "no", "by": 2},
     {**PAIR, "margin": 2.0}),
    ("preference", [], {"prompt": SAID[:1], "chosen": SAID[1:], "rejected": PAIR["rejected"]}, PAIR),
]  # fmt: skip
READERS = {"sharegpt": ["--sft"], "alpaca": ["--sft"], "preference": ["--rm"]}


@pytest.mark.parametrize(("form", "words", "row", "becomes"), FORMATS)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_format_becomes_rows_that_train(form, words, row, becomes, suffix, tmp_path, printed):
    out = tmp_path / f"out{suffix}"
    told = [] if suffix == ".jsonl" else ["--from", form]
    said = printed("data", "convert", write(tmp_path / "in.jsonl", [row]), out, *told, *words)
    assert said.startswith("wrote" if told else f"the columns are those of {form}; wrote")
    assert "1 rows" in said and read(out) == [becomes]
    printed("data", "validate", out, *READERS.get(form, []))


def test_rows_that_cannot_be_converted_are_named_or_left_out(tmp_path, refused, printed):
    rows = [SUM, {**SUM, "answer": "5"}, {**SUM, "answer": "#### five"}, {**SUM, "question": " "}, SUM]
    words = ["data", "convert", write(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"]
    said = refused(*words)
    assert "3 row(s) that cannot be converted from gsm8k" in said
    assert "row 1: no answer\n" in said and "row 3: prompt: nothing but white space\n" in said
    assert "row 2: data_source 'openai/gsm8k': the reward function" in said
    assert not (tmp_path / "out.parquet").exists()
    assert "2 rows for `tandem train`, 3 left out" in printed(*words, "--skip")
    assert [row["extra_info"]["index"] for row in read(tmp_path / "out.parquet")] == [0, 4]
    assert "this file exists" in refused(*words, "--skip")
    printed(*words, "--skip", "--overwrite")


@pytest.mark.parametrize(
    ("row", "words", "message"),
    [
        ({"a": 1}, "", "no known format"),
        (SUM, "--from gsm9k", "expected: dapo, sharegpt"),
        (SUM, "--from math", "missing column 'problem' and 'solution'"),
        (SUM, "--columns question", "expected: NAME=YOURS"),
        (SUM, "--columns question=frage", "missing column 'frage'"),
        ({"prompt": "1", "answer": "2"}, "", "no data_source"),
        ({"conversations": TALK[1:]}, "", "the first message is the assistant's"),
        ({"conversations": [*TALK, {"from": "narrator", "value": "x"}]}, "", "'narrator' is not one of"),
        ({"conversations": [*TALK, {"from": "human", "value": None}]}, "", "'content' is null"),
        ({"conversations": "hi"}, "", "must be a list of turns"),
        ({"instruction": "", "output": "x"}, "", "no instruction"),
        ({"prompt": "x", "chosen": "same", "rejected": "same"}, "", "chosen and rejected are the same"),
        ({"chosen": "a", "rejected": "b"}, "", "an empty list of messages"),
        ({"prompt": None, "reward_model": None}, "--source s", "prompt: not a list of messages but null"),
    ],
)
def test_what_cannot_be_converted(row, words, message, tmp_path, refused):
    out = tmp_path / "out.jsonl"
    assert message in refused("data", "convert", write(tmp_path / "in.jsonl", [row]), out, *words.split())
    assert not out.exists()


LONG = (
    "a train leaves the town at {} in the morning and drives {} miles an hour to the {} by the sea, "
    "where it waits until noon before it goes all the way back with twice as many people as in the morning"
)


def test_repeated_near_and_leaked_rows_are_left_out(tmp_path, printed):
    texts = [
        LONG.format(8, 40, "harbour"),
        LONG.format(9, 50, "village"),
        "  A TRAIN leaves " + LONG.format(8, 40, "harbour")[len("a train leaves ") :],  # 2: the same as 0
        LONG.format(8, 40, "lighthouse"),  # 3: nearly the same as 0
        LONG.format(8, 41, "harbour"),  # 4: another number, so a different question
        "1+1=",
        "1+2=",
        LONG.format(9, 50, "Village"),  # 7: the same as 1
    ]
    rows = [scored("arithmetic", text, "1") for text in texts]
    held = [scored("arithmetic", text, "1") for text in ("7+7=", LONG.format(9, 50, "lighthouse"), "1+2= ")]
    source, val = write(tmp_path / "in.jsonl", rows), write(tmp_path / "val.jsonl", held)
    dedupe, out = ("data", "dedupe", source, tmp_path / "o.jsonl", "--overwrite"), tmp_path / "o.jsonl"
    said = printed(*dedupe[:-1]).splitlines()
    assert said[:2] == ["row 2: repeats row 0", "row 7: repeats row 1"]
    assert said[2].startswith("row 3: repeats row 0 (0.") and len(said) == 4
    assert said[3].endswith("5 of 8 rows; left out: 2 repeated, 1 near")
    assert read(out) == [rows[at] for at in (0, 1, 4, 5, 6)]
    said = printed(*dedupe, "--against", val).splitlines()
    assert f"row 6: its prompt is in {val}, row 2" in said
    assert any(line.startswith(f"row 1: its prompt is in {val}, row 1 (0.") for line in said)
    assert read(out) == [rows[at] for at in (0, 4, 5)]
    printed(*dedupe, "--ngram", "0")
    assert read(out) == [rows[at] for at in (0, 1, 3, 4, 5, 6)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_near_pairs_are_those_of_a_slow_search(data):
    words = st.lists(st.sampled_from("abc12"), min_size=1, max_size=9).map(" ".join)
    texts = data.draw(st.lists(words, min_size=1, max_size=9))
    overlap = data.draw(st.sampled_from([0.4, 0.7, 1.0]))

    def grams(text: str) -> set[tuple[str, ...]]:
        parts = text.split()
        return {tuple(parts[at : at + 2]) for at in range(max(1, len(parts) - 1))}

    near = {}
    for j, later in enumerate(texts):
        for i, earlier in enumerate(texts[:j]):
            digits = [[c for c in text if c.isdigit()] for text in (earlier, later)]
            share = len(grams(earlier) & grams(later)) / len(grams(earlier) | grams(later))
            first = earlier not in texts[:i] and later not in texts[:j]
            if first and digits[0] == digits[1] and share >= overlap:
                near[i, j] = share
    rows = DataFiles(pa.table({"prompt": texts}), (Path("x"),), (0,))
    found = {
        (i, j): share for i, j, share in alike([Texts(rows, prompt=True)], 2, overlap) if texts[i] != texts[j]
    }
    assert found == near
    same = {(i, j) for i, j, share in alike([Texts(rows, prompt=True)], 0, overlap)}
    assert same == {(texts.index(text), j) for j, text in enumerate(texts) if texts.index(text) < j}


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xy")), min_size=1, max_size=40),
    share=st.floats(0.05, 0.95),
    seed=st.integers(0, 3),
)
def test_a_split_keeps_prompts_together(prompts, share, seed):
    table = pa.table({"prompt": [p for p, _ in prompts], "data_source": [s for _, s in prompts]})
    chosen = split(DataFiles(table, (Path("x"),), (0,)), share, seed)
    assert chosen.shape == (len(prompts),)
    sides: dict[str, set[bool]] = {}
    for (prompt, _), side in zip(prompts, chosen.tolist(), strict=True):
        sides.setdefault(prompt, set()).add(side)
    assert all(len(side) == 1 for side in sides.values())
    first = {prompt: source for prompt, source in reversed(prompts)}
    largest = max(sum(p == each for p, _ in prompts) for each in first)
    for source in "xy":
        rows = [side for (p, _), side in zip(prompts, chosen.tolist(), strict=True) if first[p] == source]
        assert abs(sum(rows) - share * len(rows)) <= largest


def test_split_is_a_partition_by_source_and_the_same_for_a_seed(tmp_path, printed):
    sources = ["gsm8k"] * 100 + ["arithmetic"] * 300
    rows = [scored(source, f"{at // 2}+1=", str(at // 2)) for at, source in enumerate(sources)]
    source = write(tmp_path / "in.jsonl", rows)

    def halves(seed: int, name: str) -> tuple[Rows, Rows]:
        outs = tmp_path / f"{name}a.jsonl", tmp_path / f"{name}b.parquet"
        printed("data", "split", source, *outs, "--share", "0.1", "--seed", seed)
        return read(outs[0]), read(outs[1])

    train, val = halves(1, "one")
    assert [len([r for r in val if r["data_source"] == name]) for name in ("gsm8k", "arithmetic")] == [10, 30]
    assert sorted(map(json.dumps, train + val)) == sorted(map(json.dumps, rows))
    prompts = [{row["prompt"][0]["content"] for row in part} for part in (train, val)]
    assert not prompts[0] & prompts[1]
    assert halves(1, "again") == (train, val)
    assert halves(2, "other") != (train, val)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a.jsonl b.jsonl", "one side would have no rows"), ("a.jsonl a.jsonl", "named twice"),
        ("a.txt b.jsonl", "unknown format"), ("a.jsonl b.jsonl --share 1", "between 0 and 1"),
    ],
)  # fmt: skip
def test_splits_that_cannot_be(words, said, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    write(Path("few.jsonl"), [scored("gsm8k", "0+1=", "0")] * 2)
    assert said in refused("data", "split", "few.jsonl", *words.split())


def test_show_says_what_is_there(tmp_path, printed):
    sums = [scored("arithmetic", "1+1=", "2"), scored("arithmetic", "1+22=", "23")]
    file = write(tmp_path / "in.jsonl", [sums[0], scored("gsm\x1b[2J", "x\u202e\n── row 9", "3"), sums[1]])
    out = printed("data", "show", file, "--n", "2")
    assert out.startswith(f"{file}: 3 rows\n  data_source: string\n")
    assert "data sources:\n  arithmetic: 2\n  gsm\\x1b[2J: 1\n" in out and "\x1b" not in out
    assert "prompt, characters: 0% 10, 5% 10, 50% 11, 95% 17, 99% 17, 100% 17\n" in out
    assert "── row 1\n" in out and "── row 2\n" not in out
    assert "prompt:\n | user: x\\u202e\n | ── row 9\n" in out
    make_tokenizer(tmp_path / "model")
    out = printed("data", "show", file, f"actor_rollout_ref.model.path={tmp_path / 'model'}")
    shown = "  ".join(f"{3 + CHARACTERS.index(character)} {character!r}" for character in "1+1=")
    assert out.endswith(f"── the first prompt as the model gets it, 4 tokens\n | 1+1=\n  {shown}\n")
    assert "prompt, tokens: 0% 4, 5% 4, 50% 5" in out


@pytest.mark.parametrize("work", sorted(ACTIONS))
def test_help_of_each_work_begins_with_an_example(work, printed):
    assert ACTIONS[work][1].split(" --")[0] in " ".join(printed("data", work, "--help").split())
    assert f"tandem data {work} " in printed("data", "--help")


def test_unknown_work(refused):
    error = refused("data", "shuffle")
    assert "shuffle" in error and all(name in error for name in ACTIONS)


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch, typed):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    ((raw, session),) = re.findall(r"```json\n(.*?)```\n\n```console\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("raw.jsonl").write_text(raw)
    steps = session.split("$ tandem ")[1:]
    assert len(steps) == 6
    for step in steps:
        command, _, printed = step.partition("\n")
        assert "".join(typed(*command.split())[1:]) == printed


def test_a_json_list_keeps_columns_that_its_first_row_lacks(tmp_path):
    (tmp_path / "a.json").write_text('[{"prompt": "x"}, {"prompt": "y", "answer": "2"}]')
    assert read_files(str(tmp_path / "a.json"), ("answer",), optional=None).table.to_pylist() == [
        {"answer": None, "prompt": "x"},
        {"answer": "2", "prompt": "y"},
    ]
