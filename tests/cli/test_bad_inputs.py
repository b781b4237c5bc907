"""Bad inputs: `check`, `check --here` and the training command report the same error, and no run starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.main import main
from tests.support.runs import lab
from tests.support.tiny import make_model, make_tokenizer, problem, write_rows

__all__ = ["lab"]

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
Rows = list[dict[str, Any]]
Same = Callable[..., None]
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
    "no number": ([f"{A}.optim.lr=nan"], f"{A}.optim.lr: out of range"),
    "negative": ([f"{A}.optim.lr=-1"], f"{A}.optim.lr: out of range"),
    "text for a number": (["data.train_batch_size=many"], "data.train_batch_size: wrong type"),
    "null for a number": (["data.max_prompt_length=null"], "data.max_prompt_length: wrong type"),
    "huge batch": (["data.train_batch_size=1000000000"], "data.train_batch_size: this requests"),
    "huge group": ([f"{R}.n=1000000000"], f"{R}.n: this requests"),
    "no group": ([f"{R}.n=0"], f"{R}.n: out of range"),
    "another program's key": (["optim.learning_rate=1e-6"], f"did you mean {A}.optim.lr?"),
    "misspelt key": (["data.train_batchsize=4"], "did you mean data.train_batch_size?"),
    "section for a key": (["trainer=5"], "this is a section, not a key"),
    "unknown estimator": (["algorithm.adv_estimator=grop"], "algorithm.adv_estimator: unknown value"),
    "unknown loss": ([f"{A}.policy_loss.loss_mode=nope"], "policy_loss.loss_mode: unknown value"),
    "unknown engine": ([f"{R}.name=nope"], f"{R}.name"),
    "unknown option of the estimator": (["algorithm.adv_kwargs={nope: 1}"], "nope"),
    "one response for rloo": (["algorithm.adv_estimator=rloo", f"{R}.n=1"], f"{R}.n: rloo compares"),
    "mini-batch that does not divide": ([f"{A}.ppo_mini_batch_size=3"], "does not divide"),
    "no file": (["data.train_files=nowhere.parquet"], "data.train_files: this file does not exist"),
    "no validation file": (["data.val_files=nowhere.parquet"], "data.val_files: this file does not exist"),
    "no model": (["actor_rollout_ref.model.path=/nowhere"], "model.path: this folder does not exist"),
    "no reward file": (["custom_reward_function.path=nowhere.py"], "this file does not exist"),
    "validation without files": (["trainer.test_freq=1"], "there are no validation files"),
    "key without its switch": ([f"{A}.kl_loss_coef=0.1"], f"{A}.kl_loss_coef: has no effect"),
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


SUPERVISED: dict[str, tuple[str, Rows, list[str], str]] = {
    "sft, no rows": ("sft", [], [], "the data file is empty"),
    "sft, other columns": ("sft", [{"question": "1"}] * 8, [], "missing column 'messages'"),
    "sft, no response": ("sft", [{"prompt": "1+1="}] * 8, [], "'response'"),
    "sft, numbers": ("sft", [{"prompt": 1}] * 8, [], "the column 'prompt' holds numbers"),
    "sft, null": ("sft", [{"prompt": "1+1=", "response": None}] * 8, [], "row 0"),
    "sft, too long": (
        "sft",
        [{"prompt": "1" * 90, "response": "2"}] * 8,
        ["data.max_length=64"],
        "max_length",
    ),
    "sft, too few": ("sft", [{"prompt": "1+1=", "response": "2"}] * 3, [], "do not fill one batch"),
    "rm, no rows": ("rm", [], [], "the data file is empty"),
    "rm, no rejected": ("rm", [{"prompt": "1+1=", "chosen": "2"}] * 8, [], "'rejected'"),
    "rm, no prompt": (
        "rm",
        [{"chosen": "2", "rejected": "3"}] * 8,
        ["data.prompt_key=asked"],
        "missing column 'asked'",
    ),
    "rm, too few": (
        "rm",
        [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 3,
        [],
        "do not fill one batch",
    ),
}


@pytest.mark.parametrize("name", SUPERVISED)
def test_examples_that_are_wrong(lab, tmp_path, say_the_same, name):
    command, rows, words, telling = SUPERVISED[name]
    say_the_same(command, supervised(tmp_path, lab.model, rows) + words, telling)


def supervised(folder: Path, model: Path, rows: Rows) -> list[str]:
    file = write_rows(folder / "examples.parquet", rows)
    run = [f"trainer.default_local_dir={folder / 'run'}", "trainer.logger=[]"]
    return [f"data.train_files={file}", f"model.path={model}", "data.train_batch_size=4", *run]


@pytest.fixture
def say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Same:
    """Check that three commands refuse an input, say what is wrong, and start no run."""

    def run(command: str, words: list[str], telling: str) -> None:
        checks = ["check", *([] if command == "train" else [f"--{command}"])]
        for given in (checks, [*checks, "--here"], [command]):
            assert main([*given, *words]) == 1, given
            said = capsys.readouterr()
            assert telling in said.err and "is sound" not in said.out, given
            assert not (tmp_path / "run" / "metrics.jsonl").exists(), given

    return run
