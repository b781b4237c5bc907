import gzip
import io
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tandem.cli.main import main
from tandem.data.prompts import PromptDataset
from tandem.errors import DataError
from tests.support.tiny import problem

Rows = list[dict[str, Any]]
Broken = Callable[[Rows], bytes]
Change = Callable[[dict[str, Any]], Any]
LAST = 5


def parquet(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


def no_rows(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows).slice(0, 0), file)
    return file.getvalue()


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def listed(rows):
    return json.dumps(rows).encode()


def damaged(rows):
    """Return a parquet file whose columns are overwritten, and whose footer is whole."""
    data = bytearray(parquet([{**row, "prompt": f"question {n}"} for n, row in enumerate(rows * 9)]))
    data[4:200] = bytes(196)
    return bytes(data)


def adds(text):
    return lambda rows: lines(rows) + text


def sets(column, value):
    return lambda row: row.update({column: value})


def truth(value, source="arithmetic"):
    return lambda row: row.update(data_source=source, reward_model={"style": "rule", "ground_truth": value})


def prompt(value):
    return sets("prompt", value)


def says(*messages):
    return prompt([{"role": role, "content": content} for role, content in messages])


ALL = f"row 0 to row {LAST}: "
BYTES: list[tuple[str, str, Broken, str]] = [  # the fault, the file, what stands in it, the message
    ("an empty file", "a.parquet", lambda rows: b"", "the data file is empty"),
    ("no rows", "a.parquet", no_rows, "the data file is empty"),
    ("parquet cut off", "a.parquet", lambda rows: parquet(rows)[:-30], "not a readable parquet file"),
    ("damage in the columns", "a.parquet", damaged, "not a readable parquet file"),
    ("parquet that is none", "a.parquet", lambda rows: b"PAR1 but no more", "not a readable parquet file"),
    ("lines named parquet", "a.parquet", lines, "not a readable parquet file"),
    ("parquet named lines", "a.jsonl", parquet, "row 0 (line 1) to row 2 (line 3): broken JSON"),
    ("gzip cut off", "a.jsonl.gz", lambda rows: gzip.compress(lines(rows))[:-12], "a readable JSON-lines"),
    ("gzip that is none", "a.jsonl.gz", lines, "not a readable JSON-lines file"),
    ("Arrow that is none", "a.arrow", lines, "not a readable Arrow file"),
    ("half a last line", "a.jsonl", lambda rows: lines(rows)[:-40], "row 5 (line 6): broken JSON: "),
    ("half a first line", "a.jsonl", lambda rows: lines(rows)[40:], "row 0 (line 1): broken JSON: Extra"),
    ("a line after blank ones", "a.jsonl", adds(b"\n\n{'a': 1}\n"), "row 6 (line 9): broken"),
    ("a list among lines", "a.jsonl", adds(b"[1]\n"), "row 6 (line 7): a list, not an obj"),
    ("null among lines", "a.jsonl", adds(b"null\n"), "row 6 (line 7): prompt: not a list of mess"),
    ("Latin-1", "a.jsonl", adds(b'{"prompt": "caf\xe9"}\n'), "(line 7): not UTF-8: invalid"),
    ("UTF-16", "a.jsonl", lambda rows: lines(rows).decode().encode("utf-16"), "row 0 (line 1): not UTF-8"),
    ("lists in lists without end", "a.jsonl", adds(b"[" * 200_000 + b"\n"), "(line 7): broken JSON: nes"),
    ("half a character", "a.jsonl", lambda rows: b'{"prompt": "\\ud800"}\n' + lines(rows), "row 0 (line 1):"),
    ("a row twice", "a.jsonl", lambda rows: lines([*rows, {**rows[2], "extra_info": None}]),
     "row 6 (line 7): the same as row 2 (line 3)"),
    ("a JSON list cut off", "a.json", lambda rows: listed(rows)[:-9], "not a readable JSON file"),
    ("a number in a JSON list", "a.json", lambda rows: listed([*rows, 7]), "row 6: a whole number, not"),
    ("types mixed in a JSON list", "a.json", lambda rows: listed([*rows, {**rows[0], "prompt": "text"}]),
     "row 6: prompt: text, but a list in row 0"),
    ("a number beyond 64 bits", "a.json", lambda rows: listed([{**rows[0], "extra_info": {"index": 10**30}}]),
     "row 0: extra_info.index: the number 1000"),
    ("fields too many in CSV", "a.csv", lambda rows: b"prompt,answer\n1,2\n\n1,2,3\n", "row 1 (line 4): 3"),
    ("a CSV of texts", "a.csv", lambda rows: b"prompt,data_source,reward_model\na,b,c\n", "row 0 (line 2):"),
]  # fmt: skip
LAST_ROW: list[tuple[str, Change, str]] = [  # the fault, the change of a last line, how the message goes on
    ("types mixed in lines", truth(7), "reward_model.ground_truth: a whole number, but text in row 0"),
    ("types mixed in messages", prompt([{"role": "user", "content": ["a"]}]), "prompt[].content: a list"),
    ("one answer missing", truth(None), "reward_model has no ground_truth"),
    ("an empty answer", truth("  "), "reward_model.ground_truth: empty"),
    ("an answer that is no number", truth("much", "gsm8k"), "data_source 'gsm8k': the rew"),
    ("a source without a reward", truth("1", "mine"), "data_source 'mine': no reward funct"),
    ("control characters", truth("1", "\x1b[2J"), r"data_source '\x1b[2J': no reward"),
    ("a source that is empty", sets("data_source", ""), "data_source is '', not a name"),
    ("a source that is null", sets("data_source", None), "data_source is None, not a name"),
    ("a reward_model that is null", sets("reward_model", None), "reward_model is null, not {style"),
    ("no messages", prompt([]), "prompt: an empty list of messages"),
    ("a message that is null", prompt([None]), "prompt: message 0 is not {role, content} but null"),
    ("white space", says(("user", " \n")), "prompt: nothing but white space"),
    ("no content", prompt([{"role": "user"}]), "prompt: message 0: 'content' is null, not text"),
    ("a role that is null", prompt([{"role": None, "content": "x"}]), "prompt: message 0: 'role' is null"),
    ("a role of another format", says(("human", "1+1=")), "prompt: message 0: 'human' is not one of"),
    ("the assistant is last", says(("user", "1"), ("assistant", "2")), "prompt: the last message is"),
]  # fmt: skip
ALL_ROWS: list[tuple[str, Change, str]] = [  # the fault, the change of every row of a table, the message
    ("a column of another name", lambda row: row.update(Prompts=row.pop("prompt")), "is 'Prompts' the"),
    ("two columns missing", lambda row: [row.pop(name) for name in ("data_source", "reward_model")],
     "missing column 'data_source' and 'reward_model'"),
    ("a column of nulls", prompt(None), ALL + "prompt: not a list of messages but n"),
    ("no answers at all", sets("reward_model", None), ALL + "reward_model is null, not"),
    ("a reward_model of text", sets("reward_model", "42"), ALL + "reward_model is of type str"),
    ("no field for answers", sets("reward_model", {"style": "rule"}), ALL + "reward_model has no ground"),
    ("a source that is a number", sets("data_source", 3), ALL + "data_source is 3, not a name"),
    ("extra_info that is text", sets("extra_info", "x"), ALL + "extra_info is of type str"),
    ("an empty text", prompt(""), "prompt: an empty text"),
    ("numbers for prompts", prompt(1.5), ALL + "prompt: not a list of messages but of"),
    ("texts for messages", prompt(["text"]), ALL + "prompt: message 0 is not {role, content} but of"),
    ("token ids below 0", prompt([3, -1]), ALL + "prompt: a negative token id, -1"),
    ("no role", prompt([{"from": "human", "content": "x"}]), ALL + "prompt: message 0: 'role' is missing"),
    ("a number for content", prompt([{"role": "user", "content": 3}]), ALL + "prompt: message 0: 'content'"),
    ("images", sets("images", ["cat.png"]), ALL + "images: not empty"),
]  # fmt: skip


def with_last(change):
    return lambda rows: (change(rows[-1]), lines(rows))[1]


def with_all(change):
    return lambda rows: ([change(row) for row in rows], parquet(rows))[1]


FAULTS = {how: (name, broken, message) for how, name, broken, message in BYTES}
FAULTS |= {
    how: ("a.jsonl", with_last(change), f"row {LAST} (line {LAST + 1}): {message}")
    for how, change, message in LAST_ROW
}
FAULTS |= {how: ("a.parquet", with_all(change), message) for how, change, message in ALL_ROWS}


def good():
    return [problem(10 + at, 7) for at in range(LAST + 1)]


@pytest.mark.parametrize("how", FAULTS)
def test_a_broken_file(how, tmp_path, capsys):
    name, broken, message = FAULTS[how]
    (tmp_path / name).write_bytes(broken(good()))
    assert main(["data", "validate", str(tmp_path / name)]) == 1
    said = capsys.readouterr()
    assert message in said.out
    assert " problem(s) in " in said.err and "\x1b" not in said.out + said.err


def test_all_problems_are_said_and_counted(tmp_path, capsys):
    rows = [problem(a, 7) for a in range(3000)]
    for at in range(100, 2900, 7):
        rows[at]["reward_model"]["ground_truth"] = None
    rows[2999]["data_source"] = "mine"
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    assert main(["data", "validate", str(tmp_path / "a.jsonl")]) == 1
    said = capsys.readouterr()
    named = [int(line.split()[1]) for line in said.out.splitlines() if "no ground_truth" in line]
    assert named == list(range(100, 2900, 7))
    assert "401 problem(s) in 3,000 row(s)" in said.err
    assert "400 × reward_model has no ground_truth\n" in said.err and "1 × no reward function" in said.err


def test_several_files_are_looked_at_together(tmp_path, capsys):
    for name, rows in (("a.jsonl", good()), ("b.parquet", [problem(50, 7), good()[1]])):
        (tmp_path / name).write_bytes(lines(rows) if name == "a.jsonl" else parquet(rows))
    words = ["data", "validate", str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")]
    assert main(words) == 1
    assert capsys.readouterr().out == "b.parquet row 1: the same as a.jsonl row 1 (line 2)\n"
    assert main([*words, "--allow", "duplicate"]) == 0
    (tmp_path / "b.parquet").write_bytes(with_all(truth(3))(good()))
    assert main([*words, "--allow", "duplicate"]) == 1
    assert "the files have different types in one column" in capsys.readouterr().out


def test_with_a_model_long_prompts_are_named(tmp_path, tokenizer_folder, capsys):
    rows = good()
    rows[2]["prompt"][0]["content"] = "x" * 500
    (tmp_path / "a.parquet").write_bytes(parquet(rows))
    words = ["data", "validate", str(tmp_path / "a.parquet"), "data.max_prompt_length=100"]
    assert main(words) == 0
    words += [f"actor_rollout_ref.model.path={tokenizer_folder}"]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    text = tokenizer.apply_chat_template(rows[2]["prompt"], add_generation_prompt=True, tokenize=False)
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    capsys.readouterr()
    assert main(words) == 1
    assert capsys.readouterr().out == f"row 2: {count} tokens, above data.max_prompt_length=100\n"
    assert main([*words, "data.filter_overlong_prompts=true"]) == 0
    assert main([*words, "data.truncation=left"]) == 0
    assert main([*words, "data.filter_overlong_prompts=true", "data.max_prompt_length=3"]) == 1
    assert "all prompts are longer than data.max_prompt_length" in capsys.readouterr().out


def test_rows_of_the_other_commands(tmp_path, tokenizer_folder, capsys):
    asked, told = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    (tmp_path / "sft.jsonl").write_bytes(lines([{"messages": [asked, told]}, {"messages": [told, asked]}]))
    assert main(["data", "validate", "--sft", str(tmp_path / "sft.jsonl")]) == 1
    assert capsys.readouterr().out == "row 1 (line 2): messages: the first message is the assistant's\n"
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": wrong} for wrong in ("3", "2", None)]
    (tmp_path / "rm.jsonl").write_bytes(lines(pairs))
    assert main(["data", "validate", "--rm", str(tmp_path / "rm.jsonl")]) == 1
    assert capsys.readouterr().out == (
        "row 2 (line 3): rejected: null, not text\nrow 1 (line 2): chosen and rejected are the same\n"
    )
    (tmp_path / "rm.jsonl").write_bytes(lines(pairs[:1]))
    words = ["data", "validate", "--rm", str(tmp_path / "rm.jsonl"), f"model.path={tokenizer_folder}"]
    assert main(words) == 0 and main([*words, "data.max_length=3"]) == 1
    assert "1 row(s) of 1 are over the length limit" in capsys.readouterr().out


def test_a_reward_of_ones_own_needs_its_own_columns(tmp_path):
    (tmp_path / "reward.py").write_text("def right(prompt, response, answer):\n    return 1.0\n")
    (tmp_path / "a.csv").write_text("prompt,answer\n1+1=,2\n1+2=,3\n")
    words = ["data", "validate", str(tmp_path / "a.csv")]
    assert main(words) == 1
    own = [f"custom_reward_function.path={tmp_path / 'reward.py'}", "custom_reward_function.name=right"]
    assert main([*words, *own]) == 0


MESSAGES = [[{"role": "user", "content": "x"}], [{"role": "user"}]]
VALUES = st.text("ab \n", max_size=3) | st.integers(-1, 3) | st.sampled_from(
    [None, [], {"style": "rule", "ground_truth": None}, *MESSAGES]
)  # fmt: skip
COLUMNS = st.sampled_from(["prompt", "data_source", "reward_model", "extra_info"])
CHANGES = st.lists(st.tuples(st.integers(0, LAST), COLUMNS, VALUES), max_size=3)


@settings(max_examples=60, deadline=None)
@given(changes=CHANGES, whole=st.booleans(), cut=st.sampled_from([0, 0, 0, 9]))
def test_validation_and_training_agree(tokenizer_folder, changes, whole, cut):
    rows = good()
    for at, column, value in changes:
        rows[at][column] = value
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / ("a.json" if whole else "a.jsonl")
        content = json.dumps(rows).encode() if whole else lines(rows)
        file.write_bytes(content[: len(content) - cut])
        words = [str(file), f"actor_rollout_ref.model.path={tokenizer_folder}"]
        passed = main(["data", "validate", *words]) == 0
        trains = False
        with suppress(DataError):
            trains = bool(PromptDataset(str(file), AutoTokenizer.from_pretrained(tokenizer_folder)))
    assert trains or not passed
    assert passed or changes or cut
