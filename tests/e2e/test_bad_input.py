"""What a user sees if input is refused before training.

The exit status is 1, one error names field, value and remedy, and nothing is written.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tandem.observability.run import read_metrics
from tests.e2e.shop import Shop, finish, start
from tests.e2e.user import User
from tests.support.tiny import make_model, problem, write_rows

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


# The config.


@pytest.mark.parametrize(
    ("word", "telling"),
    [
        ("data.train_batchsize=4", ("data.train_batchsize: unknown key", "data.train_batch_size")),
        ("trainer.nnodes=two", ("trainer.nnodes: wrong type", '"two"', "integer >= 1")),
        (f"{ROLLOUT}.temperature=-1", (f"{ROLLOUT}.temperature: out of range", "-1", "number > 0")),
        (f"{ACTOR}.kl_loss_type=low_var", (f"{ACTOR}.kl_loss_type", "low_var_kl")),
        (f"{ACTOR}.ppo_mini_batch_size=8",
         (f"{ACTOR}.ppo_mini_batch_size: larger than data.train_batch_size", "8", "at most 4", "set")),
        (f"{ACTOR}.ppo_mini_batch_size=3",
         (f"{ACTOR}.ppo_mini_batch_size: does not divide data.train_batch_size", "3", "divisor of 4", "=2")),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=13",
         (f"{ACTOR}.ppo_max_token_len_per_gpu", "13", "at least 14", "=14")),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", (f"{ACTOR}.ulysses_sequence_parallel_size", "=1")),
        ("trainer.placement={critc: global_pool}", ("trainer.placement", "critc", "critic")),
        ("trainer.placement={critic: globl_pool}", ("trainer.placement", "globl_pool", "global_pool")),
        ("trainer.nnodes=2", ("trainer.resource_pools", "1 + 1 process(es) on 2 node(s)", "trainer.nnodes")),
        ("actor_rollout_ref.model.path=/nowhere",
         ("actor_rollout_ref.model.path: this folder does not exist", "/nowhere", "check the path")),
        ("data.train_files=/nowhere.parquet",
         ("data.train_files: this file does not exist", "/nowhere.parquet", "check the path")),
        ("custom_reward_function.path=/nowhere.py",
         ("custom_reward_function.path: this file does not exist",)),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be(user: User, word: str, telling: tuple[str, ...]) -> None:
    user.is_refused(word, telling=telling)


def test_everything_wrong_with_a_config_is_said_at_once(user: User) -> None:
    outcome = user.is_refused("data.foo=1", "trainer.nnodes=two", "trainer.save_freq=-5", telling=())
    assert outcome.error.startswith("tandem train: 3 error(s) in the config")


def test_a_real_process_says_it_too(shop: Shop, tmp_path: Path) -> None:
    done = finish(start(shop.short("unused", "data.train_batchsize=4"), tmp_path))
    assert done.returncode == 1
    assert "data.train_batchsize: unknown key" in done.stderr
    assert "data.train_batch_size" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there(user: User) -> None:
    user.is_refused(
        "trainer.device=cuda",
        telling=("trainer.device: this machine does not have that device", "cuda:0", "trainer.device=cpu"),
    )


# Models.


def test_model_folders_that_cannot_be_used(user: User) -> None:
    empty = user.folder / "empty"
    empty.mkdir()
    user.is_refused(f"actor_rollout_ref.model.path={empty}",
                    telling=("actor_rollout_ref.model.path: this folder has no config.json",))  # fmt: skip
    for name, damage, telling in (
        ("garbled", {"config.json": "{"}, "config.json"),
        ("weightless", {"model.safetensors": None}, "contains no weights"),
        ("torn", {"model.safetensors": "torn"}, "weights cannot be loaded"),
        ("speechless", {"tokenizer.json": None}, "no tokenizer"),
    ):
        folder = make_model(user.folder / name)
        for file, content in damage.items():
            (folder / file).unlink()
            if content is not None:
                (folder / file).write_text(content)
        outcome = user.types(f"actor_rollout_ref.model.path={folder}", run=f"run_{name}")
        assert outcome.status == 1
        assert telling in outcome.error
        assert str(folder) in outcome.error
        assert "model.path" in outcome.error
        assert "remedy" in outcome.error


def test_no_chat_template(user: User) -> None:
    folder = make_model(user.folder / "model")
    (folder / "chat_template.jinja").unlink()
    user.is_refused(
        f"actor_rollout_ref.model.path={folder}",
        telling=("tokenizer.chat_template", str(folder), "actor_rollout_ref.model.custom_chat_template="),
    )
    template = "\"{% for m in messages %}{{ m['content'] }}{% endfor %}\""
    mended = user.types(
        f"actor_rollout_ref.model.path={folder}",
        f"actor_rollout_ref.model.custom_chat_template={template}",
    )
    assert mended.status == 0


# Data.


def test_data_files_that_cannot_be_read(user: User) -> None:
    garbled = user.folder / "garbled.parquet"
    garbled.write_bytes(b"PAR1 and then nothing")
    user.is_refused(
        f"data.train_files={garbled}", telling=("not a readable parquet file", str(garbled), "write the file")
    )
    user.is_refused(
        f"data.train_files={garbled}", "--dry-run", telling=("not a readable parquet file", str(garbled))
    )
    empty = user.folder / "empty.parquet"
    pq.write_table(pa.Table.from_pylist([problem(1, 2)]).slice(0, 0), empty)
    user.is_refused(f"data.train_files={empty}", telling=("the data file is empty", str(empty), "0 rows"))
    rows = [{"question": "1+2=", "data_source": "arithmetic"}]
    columns = write_rows(user.folder / "columns.parquet", rows)
    user.is_refused(
        f"data.train_files={columns}",
        telling=("missing column 'prompt' and 'reward_model'", str(columns), "question", "data.prompt_key"),
    )
    user.is_refused(f"data.val_files={columns}", telling=("missing column", str(columns)))


def test_rows_of_the_wrong_shape_are_named(user: User) -> None:
    rows = [json.loads(json.dumps(problem(1, b))) for b in range(6)]
    rows[1]["prompt"] = []
    rows[3]["reward_model"]["ground_truth"] = None
    rows[4]["data_source"] = None
    data = write_rows(user.folder / "rows.parquet", rows)
    user.is_refused(
        f"data.train_files={data}",
        telling=(
            "3 row(s) of the wrong shape",
            str(data),
            "row 1: prompt: an empty list of messages",
            "row 3: reward_model has no ground_truth",
            "row 4: data_source is None",
            "fix or remove these rows",
        ),
    )


def test_a_data_source_without_a_reward(user: User) -> None:
    rows = [problem(1, b) | {"data_source": "poems"} for b in range(4)]
    data = write_rows(user.folder / "poems.parquet", rows)
    user.is_refused(
        f"data.train_files={data}",
        "custom_reward_function.path=null",
        telling=("data_source 'poems'", "no reward function", "custom_reward_function.path"),
    )


def test_prompts_over_the_limit(user: User) -> None:
    words = ("data.max_prompt_length=4", f"data.val_files={user.shop.train}", f"{ROLLOUT}.n=2")
    whole = "data.filter_overlong_prompts=false"
    user.is_refused(
        *words,
        whole,
        telling=("data.max_prompt_length: 10 row(s) of 24 are over the length limit", "5 tokens", "row 14",
                 "at most 4 tokens", "data.truncation=left|right|middle"),
    )  # fmt: skip
    for mode in ("left", "right", "middle"):
        outcome = user.types(*words, whole, f"data.truncation={mode}", run=mode)
        assert outcome.status == 0
        assert read_metrics(outcome.folder / "metrics.jsonl")[0]["prompt_length/max"] == 4
    user.is_refused(
        "data.max_prompt_length=3",
        telling=(
            "all 24 prompts are over the length limit",
            str(user.shop.train),
            "raise data.max_prompt_length",
        ),
    )


def test_fewer_rows_than_a_batch(user: User) -> None:
    user.is_refused("data.train_batch_size=40", f"{ACTOR}.ppo_mini_batch_size=40",
                    telling=("data.train_batch_size", "24 row(s) of data", "lower"))  # fmt: skip


# Rewards.


@pytest.mark.parametrize(
    ("content", "telling"),
    [
        ("def score(a):\n    return 1\n", ("custom_reward_function.name: no such function", "one of score")),
        (
            "def compute_score(text):\n    return 1\n",
            ("which responses the function needs", "solution_str"),
        ),
        ("import nowhere\n", ("custom_reward_function.path", "No module named 'nowhere'")),
    ],
)
def test_a_reward_file_that_cannot_be_used(user: User, content: str, telling: tuple[str, ...]) -> None:
    file = user.folder / "own_reward.py"
    file.write_text(content)
    user.is_refused(f"custom_reward_function.path={file}", telling=telling)


# The run folder.


def test_a_run_folder_that_is_a_file_or_below_one(user: User) -> None:
    file = user.folder / "file"
    file.touch()
    for folder in (file, file / "run"):
        outcome = user.types(f"trainer.default_local_dir={folder}")
        assert outcome.status == 1
        assert "trainer.default_local_dir: this folder is not writable" in outcome.error
        assert str(file) in outcome.error
