"""What a user sees of each bad input: status 1, one error that names field, value and remedy, and a disk
on which nothing was written or lost."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tandem.checkpoint import open_checkpoint
from tandem.cli.main import main
from tandem.observability.run import read_metrics
from tandem.observability.timers import read_timeline
from tandem.protocol import DataProto
from tests.e2e.shop import Shop, finish, start
from tests.support.tiny import make_model, problem, write_rows

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Outcome:
    """What a command left behind.

    Attributes:
        status: its exit status.
        said, error: what it printed, and what it printed of an error.
        folder: its run folder.
    """

    status: int
    said: str
    error: str
    folder: Path


class User:
    """Types commands."""

    def __init__(self, shop: Shop, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.shop = shop
        self.folder = folder
        self._capsys = capsys

    def types(self, *words: str, run: str = "run") -> Outcome:
        """`tandem train` with a command line that is sound but for `words`."""
        self._capsys.readouterr()
        status = main(["train", *self.shop.short("unused", f"trainer.default_local_dir={self.folder / run}", *words)])
        captured = self._capsys.readouterr()
        print(captured.err)
        return Outcome(status, captured.out, captured.err, self.folder / run)

    def is_refused(self, *words: str, telling: tuple[str, ...]) -> Outcome:
        """Before anything is written: every text of `telling` is in the error."""
        outcome = self.types(*words)
        assert outcome.status == 1
        for text in telling:
            assert text in outcome.error, text
        assert "Traceback" not in outcome.error
        assert not outcome.folder.exists()
        return outcome


@pytest.fixture
def user(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> User:
    return User(shop, tmp_path, capsys)


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
        ("trainer.n_gpus_per_node=2", ("trainer.n_gpus_per_node", "2 per node", "set trainer.n_gpus_per_node=1")),
        ("actor_rollout_ref.model.path=/nowhere",
         ("actor_rollout_ref.model.path: no such folder", "/nowhere", "check the path")),
        ("data.train_files=/nowhere.parquet",
         ("data.train_files: no such file", "/nowhere.parquet", "check the path")),
        ("custom_reward_function.path=/nowhere.py", ("custom_reward_function.path: no such file",)),
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
                    telling=("actor_rollout_ref.model.path: not a model folder", "config.json"))  # fmt: skip
    for name, damage, telling in (
        ("garbled", {"config.json": "{"}, "config.json"),
        ("weightless", {"model.safetensors": None}, "holds no weights"),
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
    user.is_refused(f"data.train_files={garbled}", telling=("not a readable parquet file", str(garbled), "write"))
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
            "mend or remove these rows",
        ),
    )


def test_a_data_source_without_a_reward(user: User) -> None:
    data = write_rows(user.folder / "poems.parquet", [problem(1, b) | {"data_source": "poems"} for b in range(4)])
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
        telling=("all 24 prompts are over the length limit", str(user.shop.train), "raise data.max_prompt_length"),
    )


def test_fewer_rows_than_a_batch(user: User) -> None:
    user.is_refused("data.train_batch_size=40", f"{ACTOR}.ppo_mini_batch_size=40",
                    telling=("data.train_batch_size", "24 row(s) of data", "lower"))  # fmt: skip


# Rewards.

REWARDS = {
    "raises": ("return 1 / 0", "raised ZeroDivisionError: division by zero"),
    "nan": ("return float('nan')", "returned a number that is not finite"),
    "text": ("return 'good'", "returned something that is not a number"),
    "nothing": ("return None", "returned something that is not a number"),
    "no_score": ("return {'accuracy': 1.0}", "returned a dict without 'score'"),
}


@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_function_that_fails(user: User, kind: str) -> None:
    """At the third response of the second step: it is named, and the first step's checkpoint goes on."""
    body, telling = REWARDS[kind]
    file = user.folder / "own_reward.py"
    good = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    file.write_text(
        "calls = 0\n" + good.replace("    return 1.0\n", "    global calls\n    calls += 1\n"
        f"    if calls == 15:\n        {body}\n    return 1.0\n")
    )  # fmt: skip
    words = (f"custom_reward_function.path={file}", "trainer.total_training_steps=3", "trainer.save_freq=1")
    outcome = user.types(*words)
    assert outcome.status == 1
    assert f"the reward function compute_score ({file}) {telling}" in outcome.error
    assert "sample 2, row " in outcome.error
    assert "mend the reward function" in outcome.error
    file.write_text(good)
    assert goes_on(user, words, after=1) == [1, 2, 3]


def goes_on(user: User, words: tuple[str, ...], *, after: int) -> list[int]:
    """The same command resumes after that step; the steps of the whole run."""
    outcome = user.types(*words)
    assert outcome.status == 0
    assert f"resumed from {outcome.folder}/checkpoints/step_{after:06d} after step {after}" in outcome.said
    return [row["step"] for row in read_metrics(outcome.folder / "metrics.jsonl")]


def test_a_batched_reward_of_the_wrong_length(user: User) -> None:
    file = user.folder / "batched.py"
    file.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [1.0] * (len(solution_strs) - 1)\n"
        "compute_score.batched = True\n"
    )
    outcome = user.types(f"custom_reward_function.path={file}")
    assert outcome.status == 1
    assert "returned a list of the wrong length" in outcome.error
    assert "11 scores for 12 responses" in outcome.error


@pytest.mark.parametrize(
    ("content", "telling"),
    [
        ("def score(a):\n    return 1\n", ("custom_reward_function.name: no such function", "one of score")),
        ("def compute_score(text):\n    return 1\n", ("cannot be called as needed", "solution_str")),
        ("import nowhere\n", ("custom_reward_function.path", "No module named 'nowhere'")),
    ],
)
def test_a_reward_file_that_cannot_be_used(user: User, content: str, telling: tuple[str, ...]) -> None:
    file = user.folder / "own_reward.py"
    file.write_text(content)
    user.is_refused(f"custom_reward_function.path={file}", telling=telling)


# Trouble on the way.


def test_a_loss_that_is_not_finite(user: User) -> None:
    """It stops before the weights change, keeps the batch, and the run can be resumed."""
    file = user.folder / "own_loss.py"
    good = (
        "def loss(log_probs, old_log_probs, advantages):\n"
        "    return -advantages * (log_probs - old_log_probs).exp(), {}\n"
    )
    file.write_text(
        "updates = 0\n" + good.replace("    return", "    global updates\n    updates += 1\n"
        "    if updates == 3:\n        log_probs = log_probs * float('nan')\n    return")
    )  # fmt: skip
    words = (f"{ACTOR}.policy_loss.loss_mode={file}:loss", f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
             "trainer.total_training_steps=3", "trainer.save_freq=1")  # fmt: skip
    outcome = user.types(*words)
    assert outcome.status == 1
    assert "actor update 2: the loss is not finite; no weight has changed" in outcome.error
    saved = outcome.folder / "log" / "actor_update_2_rank_0.pt"
    assert f"DataProto.load('{saved}')" in outcome.error
    culprit = DataProto.load(saved)
    assert len(culprit) == 6
    assert {"tokens", "advantages", "old_log_probs", "response_mask"} <= set(culprit.batch)
    file.write_text(good)
    assert goes_on(user, words, after=1) == [1, 2, 3]


def test_a_damaged_checkpoint(user: User) -> None:
    words = ("trainer.save_freq=1", "trainer.total_training_steps=2")
    first = user.types(*words)
    newest = first.folder / "checkpoints" / "step_000002"
    (shard,) = (newest / "actor").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    resumed = user.types(*words)
    assert resumed.status == 0
    assert "Checkpoint passed over, trying the one before it" in resumed.said
    assert str(shard) in resumed.said
    assert "step_000001 after step 1" in resumed.said
    assert [row["step"] for row in read_metrics(first.folder / "metrics.jsonl")] == [1, 2]
    assert open_checkpoint(newest).step == 2

    for step in (1, 2):
        (first.folder / "checkpoints" / f"step_{step:06d}" / "state.pt").unlink()
    hopeless = user.types(*words)
    assert hopeless.status == 1
    assert "all checkpoints are damaged" in hopeless.error
    assert "trainer.resume_mode=disable" in hopeless.error
    assert len(read_metrics(first.folder / "metrics.jsonl")) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The checkpoints folder on a disk of its own that holds one checkpoint and not two."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a disk here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk(user: User, small_disk: Path) -> None:
    words = ("trainer.save_freq=1", "trainer.total_training_steps=3")
    outcome = user.types(*words)
    assert outcome.status == 1
    assert f"{small_disk}: the disk is full" in outcome.error
    assert "MB free, as the one before took" in outcome.error
    assert "free space, or keep fewer with trainer.max_ckpt_to_keep" in outcome.error
    assert [path.name for path in small_disk.iterdir()] == ["step_000001"]
    assert open_checkpoint(small_disk / "step_000001").step == 1
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    assert goes_on(user, words, after=1) == [1, 2, 3]


@pytest.mark.e2e
def test_ctrl_c(shop: Shop, tmp_path: Path) -> None:
    """A real signal to a real process, in the second step. It ends the step, saves and says how to go on."""
    folder = tmp_path / "run"
    words = shop.short("unused", f"trainer.default_local_dir={folder}", "trainer.total_training_steps=500")
    process = start(words, tmp_path)
    while count_steps(folder / "timeline.json") < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    assert "interrupted: this step is finished and saved first; Ctrl-C again stops at once" in done.stdout
    (saved,) = (folder / "checkpoints").iterdir()
    assert f"saved {saved}; the same command resumes from it" in done.stdout
    steps = open_checkpoint(saved).step
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))

    resumed = finish(start([*words, f"trainer.total_training_steps={steps + 1}"], tmp_path))
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from {saved} after step {steps}" in resumed.stdout
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(1, steps + 2))


def count_steps(timeline: Path) -> int:
    if not timeline.exists():
        return 0
    return sum(event["ph"] == "B" and event["name"] == "step" for event in read_timeline(timeline))
