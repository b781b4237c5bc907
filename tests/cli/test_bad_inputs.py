"""Bad inputs: `check`, `check --here` and the training command report the same error, and no run starts."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import make_model, make_tokenizer, problem, write_rows

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
Rows = list[dict[str, Any]]
SUMS = [problem(a, 5) for a in range(3, 11)]


def with_(**changes: Any) -> Rows:
    """Return good rows, except that the third row has other values in these columns."""
    return [
        {**row, **(changes if place == 2 else {name: row.get(name) for name in changes})}
        for place, row in enumerate(SUMS)
    ]


def without(*columns: str) -> Rows:
    return [{name: value for name, value in row.items() if name not in columns} for row in SUMS]


CONFIGS: dict[str, tuple[list[str], str]] = {
    "negative": ([f"{A}.optim.lr=-1"], f"{A}.optim.lr: out of range"),
    "no group": ([f"{R}.n=0"], f"{R}.n: out of range"),
    "misspelt key": (["data.train_batchsize=4"], "did you mean data.train_batch_size?"),
    "no file": (["data.train_files=nowhere.parquet"], "data.train_files: this file does not exist"),
    "no validation file": (["data.val_files=nowhere.parquet"], "data.val_files: this file does not exist"),
    "no model": (["actor_rollout_ref.model.path=/nowhere"], "model.path: this folder does not exist"),
    "top_p of nothing": ([f"{R}.top_p=0"], f"{R}.top_p: out of range"),
    "beyond the model's positions": (["data.max_response_length=1000"], "max_position_embeddings"),
    "together beyond its positions": (["data.max_response_length=127"], "max_position_embeddings"),
    "more rows than there are": (["data.train_batch_size=4000"], "do not fill one batch"),
    "prompts that are too long": (["data.max_prompt_length=2"], "data.max_prompt_length"),
    "a column that is not there": (["data.prompt_key=question"], "missing column 'question'"),
    "an answer that is not there": (["data.answer_key=solution"], "missing column 'solution'"),
    "a system message that is not there": (["data.system_key=sys"], "missing column 'sys'"),
    "tools that are not there": (["data.tools_key=tools"], "missing column 'tools'"),
    "sources that are not there": (["data.mixture={other: 1}"], "data.mixture"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_wrong(lab, tmp_path, say_the_same, name):
    words, telling = CONFIGS[name]
    say_the_same("train", lab.overrides(tmp_path / "run") + words, telling)


ROWS: dict[str, tuple[Rows, str]] = {
    "none": ([], "the data file is empty"),
    "no prompt": (without("prompt"), "missing column 'prompt'"),
    "no source": (without("data_source"), "missing column 'data_source'"),
    "no ground truth column": (without("reward_model"), "missing column 'reward_model'"),
    "numbers for prompts": ([{"prompt": place} for place in range(8)], "the column 'prompt' holds numbers"),
    "a prompt of null": (with_(prompt=None), "row 2: prompt"),
    "an empty conversation": (with_(prompt=[]), "an empty list of messages"),
    "a message without text": (with_(prompt=[{"role": "user", "content": None}]), "row 2: prompt"),
    "no ground truth": (with_(reward_model={"style": "rule", "ground_truth": None}), "no ground_truth"),
    "no name of a source": (with_(data_source=None), "data_source is None"),
    "a source without a reward": (with_(data_source="nobody/knows"), "nobody/knows"),
    "a picture": (with_(images=[b"x"]), "images: not empty"),
}


@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_wrong(lab, tmp_path, say_the_same, name, part):
    rows, telling = ROWS[name]
    file = write_rows(tmp_path / "rows.parquet", rows)
    words = [f"data.{part}_files={file}", "data.max_prompt_length=64"]
    say_the_same("train", lab.overrides(tmp_path / "run") + words, telling)


def test_files_that_cannot_be_read(lab, tmp_path, say_the_same):
    words = lab.overrides(tmp_path / "run")
    for name, content in (("a.parquet", b"no parquet"), ("b.jsonl", b"{"), ("c.parquet", b"")):
        (tmp_path / name).write_bytes(content)
        say_the_same("train", [*words, f"data.val_files={tmp_path / name}"], name)


def test_a_tokenizer_without_a_template(lab, tmp_path, say_the_same):
    model = make_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    make_tokenizer(model, chat_template=None)
    words = [*lab.overrides(tmp_path / "run"), f"actor_rollout_ref.model.path={model}"]
    say_the_same("train", words, "chat template")
    talk = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    for command, row in (("sft", {"messages": talk}), ("rm", {"chosen": talk, "rejected": talk})):
        say_the_same(command, supervised(tmp_path, model, [row] * 8), "chat template")


ROW = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}
SUPERVISED: dict[str, tuple[Rows, str, str]] = {
    "sft, no rows": ([], "", "the data file is empty"),
    "sft, other columns": ([{"question": "1"}] * 8, "", "missing column 'messages'"),
    "sft, no response": ([{"prompt": "1+1="}] * 8, "", "'response'"),
    "sft, numbers": ([{"prompt": 1}] * 8, "", "the column 'prompt' holds numbers"),
    "sft, null": ([{**ROW, "response": None}] * 8, "", "row 0"),
    "sft, too long": ([{**ROW, "prompt": "1" * 90}] * 8, "data.max_length=64", "max_length"),
    "sft, too few": ([ROW] * 3, "", "do not fill one batch"),
    "rm, no rows": ([], "", "the data file is empty"),
    "rm, no rejected": ([{"prompt": "1+1=", "chosen": "2"}] * 8, "", "'rejected'"),
    "rm, no prompt": ([ROW] * 8, "data.prompt_key=asked", "missing column 'asked'"),
    "rm, too few": ([ROW] * 3, "", "do not fill one batch"),
}


@pytest.mark.parametrize("name", SUPERVISED)
def test_examples_that_are_wrong(lab, tmp_path, say_the_same, name):
    rows, words, telling = SUPERVISED[name]
    say_the_same(name.split(",")[0], supervised(tmp_path, lab.model, rows) + words.split(), telling)


def supervised(folder: Path, model: Path, rows: Rows) -> list[str]:
    file = write_rows(folder / "examples.parquet", rows)
    run = [f"trainer.default_local_dir={folder / 'run'}", "trainer.logger=[]"]
    return [f"data.train_files={file}", f"model.path={model}", "data.train_batch_size=4", *run]


@pytest.fixture
def say_the_same(refused, tmp_path: Path):
    """Return a function that checks that three commands refuse an input, name the error, and start no run."""

    def run(command: str, words: list[str], telling: str) -> None:
        checks = ["check", *([] if command == "train" else [f"--{command}"])]
        for given in (checks, [*checks, "--here"], [command]):
            assert telling in refused(*given, *words), given
            assert not (tmp_path / "run" / "metrics.jsonl").exists(), given

    return run
