"""Input that is refused before training: exit status 1, one error, and nothing is written."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tandem.observability.run import read_metrics
from tests.e2e.keys import ACTOR, ROLLOUT
from tests.e2e.shop import finish, start
from tests.support.tiny import make_model, problem, write_rows

MODEL, DATA, REWARD = "actor_rollout_ref.model.path", "data.train_files", "custom_reward_function.path"
WORDS = {
    "data.train_batchsize=4": ("data.train_batchsize", "data.train_batch_size"),
    "trainer.nnodes=two": ("trainer.nnodes", '"two"', "integer >= 1"),
    f"{ROLLOUT}.temperature=-1": (f"{ROLLOUT}.temperature", "-1", "number > 0"),
    f"{ACTOR}.kl_loss_type=low_var": (f"{ACTOR}.kl_loss_type", "low_var_kl"),
    f"{ACTOR}.ppo_mini_batch_size=8": (f"{ACTOR}.ppo_mini_batch_size", "8", "at most 4", "set"),
    f"{ACTOR}.ppo_mini_batch_size=3": (f"{ACTOR}.ppo_mini_batch_size", "3", "divisor of 4", "=2"),
    f"{ACTOR}.ppo_max_token_len_per_gpu=13": (f"{ACTOR}.ppo_max_token_len_per_gpu", "at least 14", "=14"),
    f"{ACTOR}.ulysses_sequence_parallel_size=2": (f"{ACTOR}.ulysses_sequence_parallel_size", "=1"),
    "trainer.placement={critc: global_pool}": ("trainer.placement", "critc", "critic"),
    "trainer.placement={critic: globl_pool}": ("trainer.placement", "globl_pool", "global_pool"),
    "trainer.nnodes=2": ("trainer.resource_pools", "1 + 1 process(es) on 2 node(s)", "trainer.nnodes"),
    f"{MODEL}=/nowhere": (MODEL, "/nowhere", "check the path"),
    f"{DATA}=/nowhere.parquet": (DATA, "/nowhere.parquet", "check the path"),
    f"{REWARD}=/nowhere.py": (REWARD, "/nowhere.py"),
}


@pytest.mark.parametrize("word", WORDS)
def test_a_config_that_cannot_be(user, word):
    user.is_refused(word, telling=WORDS[word])


def test_everything_wrong_with_a_config_is_said_at_once(user):
    outcome = user.is_refused("data.foo=1", "trainer.nnodes=two", "trainer.save_freq=-5", telling=())
    assert outcome.error.startswith("tandem train: 3 error(s) in the config")


def test_a_real_process_says_it_too(shop, tmp_path):
    done = finish(start(shop.short("unused", "data.train_batchsize=4"), tmp_path))
    assert done.returncode == 1
    assert "data.train_batchsize: unknown key" in done.stderr and "data.train_batch_size" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there(user):
    user.is_refused("trainer.device=cuda", telling=("trainer.device", "cuda:0", "trainer.device=cpu"))


DAMAGE = {  # a file of the model, what is in it, and a part of the error
    "garbled": ("config.json", "{", "config.json"),
    "weightless": ("model.safetensors", None, "contains no weights"),
    "torn": ("model.safetensors", "torn", "weights cannot be loaded"),
    "speechless": ("tokenizer.json", None, "no tokenizer"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_model_folders_that_cannot_be_used(user, name):
    file, content, telling = DAMAGE[name]
    folder = make_model(user.folder / name)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    outcome = user.types(f"{MODEL}={folder}")
    assert outcome.status == 1
    for text in (telling, str(folder), "model.path", "remedy"):
        assert text in outcome.error, text


def test_an_empty_model_folder(user):
    user.is_refused(f"{MODEL}={user.folder}", telling=(MODEL, "config.json"))


def test_no_chat_template(user):
    folder, key = make_model(user.folder / "model"), "actor_rollout_ref.model.custom_chat_template="
    (folder / "chat_template.jinja").unlink()
    user.is_refused(f"{MODEL}={folder}", telling=("tokenizer.chat_template", str(folder), key))
    template = "\"{% for m in messages %}{{ m['content'] }}{% endfor %}\""
    assert user.types(f"{MODEL}={folder}", f"{key}{template}").status == 0


def test_data_files_that_cannot_be_read(user):
    garbled, empty = (user.folder / f"{name}.parquet" for name in ("garbled", "empty"))
    garbled.write_bytes(b"PAR1 and then nothing")
    pq.write_table(pa.Table.from_pylist([problem(1, 2)]).slice(0, 0), empty)
    rows = [{"question": "1+2=", "data_source": "arithmetic"}]
    columns = write_rows(user.folder / "columns.parquet", rows)
    for words, telling in (
        ([f"{DATA}={garbled}"], ("not a readable parquet file", str(garbled), "write the file")),
        ([f"{DATA}={garbled}", "--dry-run"], ("not a readable parquet file", str(garbled))),
        ([f"{DATA}={empty}"], ("the data file is empty", str(empty), "0 rows")),
        ([f"{DATA}={columns}"], ("'prompt' and 'reward_model'", str(columns), "question", "data.prompt_key")),
        ([f"data.val_files={columns}"], ("missing column", str(columns))),
    ):
        user.is_refused(*words, telling=telling)


def test_rows_of_the_wrong_shape_are_named(user):
    rows = [json.loads(json.dumps(problem(1, b))) for b in range(6)]
    rows[1]["prompt"] = []
    rows[3]["reward_model"]["ground_truth"] = None
    rows[4]["data_source"] = None
    data = write_rows(user.folder / "rows.parquet", rows)
    named = ("row 1: prompt", "row 3: reward_model", "row 4: data_source")
    user.is_refused(f"{DATA}={data}", telling=("3 row(s)", str(data), *named, "fix or remove these rows"))


def test_a_data_source_without_a_reward(user):
    rows = [problem(1, b) | {"data_source": "poems"} for b in range(4)]
    data = write_rows(user.folder / "poems.parquet", rows)
    telling = ("data_source 'poems'", "no reward function", REWARD)
    user.is_refused(f"{DATA}={data}", f"{REWARD}=null", telling=telling)


def test_prompts_over_the_limit(user):
    words = ("data.max_prompt_length=4", f"data.val_files={user.shop.train}", f"{ROLLOUT}.n=2")
    whole = "data.filter_overlong_prompts=false"
    telling = (
        "10 row(s) of 24",
        "5 tokens",
        "row 14",
        "at most 4 tokens",
        "data.truncation=left|right|middle",
    )
    user.is_refused(*words, whole, telling=("data.max_prompt_length", *telling))
    for mode in ("left", "right", "middle"):
        outcome = user.types(*words, whole, f"data.truncation={mode}", run=mode)
        assert outcome.status == 0
        assert read_metrics(outcome.folder / "metrics.jsonl")[0]["prompt_length/max"] == 4
    telling = ("all 24 prompts", str(user.shop.train), "raise data.max_prompt_length")
    user.is_refused("data.max_prompt_length=3", telling=telling)


def test_fewer_rows_than_a_batch(user):
    words = ("data.train_batch_size=40", f"{ACTOR}.ppo_mini_batch_size=40")
    user.is_refused(*words, telling=("data.train_batch_size", "24 row(s) of data", "lower"))


@pytest.mark.parametrize(
    ("content", "telling"),
    [
        ("def score(a):\n    return 1\n", ("custom_reward_function.name", "score")),
        ("def compute_score(text):\n    return 1\n", ("which responses the function needs", "solution_str")),
        ("import nowhere\n", (REWARD, "No module named 'nowhere'")),
    ],
)
def test_a_reward_file_that_cannot_be_used(user, content, telling):
    file = user.folder / "own_reward.py"
    file.write_text(content)
    user.is_refused(f"{REWARD}={file}", telling=telling)


def test_a_run_folder_that_is_a_file_or_below_one(user):
    file = user.folder / "file"
    file.touch()
    for folder in (file, file / "run"):
        outcome = user.types(f"trainer.default_local_dir={folder}")
        assert outcome.status == 1
        assert "trainer.default_local_dir: this folder is not writable" in outcome.error
        assert str(file) in outcome.error
