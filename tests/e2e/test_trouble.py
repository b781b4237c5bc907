"""What a user sees if something goes wrong in the middle of a run.

The exit status is 1 (130 after Ctrl-C or SIGTERM), one error says what happened and what to do, and the same
command resumes from the run folder.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.checkpoint import open_checkpoint
from tandem.observability.run import read_metrics
from tandem.observability.timers import read_timeline
from tandem.protocol import DataProto
from tests.e2e.shop import Shop, finish, start
from tests.e2e.user import User

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def goes_on(user: User, words: tuple[str, ...], *, after: int) -> list[int]:
    """Check that the same command resumes after that step, and return the steps of the whole run."""
    outcome = user.types(*words)
    assert outcome.status == 0
    assert f"resumed from {outcome.folder}/checkpoints/step_{after:06d} after step {after}" in outcome.said
    return [row["step"] for row in read_metrics(outcome.folder / "metrics.jsonl")]


# Rewards.

REWARDS = {
    "exits": ("import sys; sys.exit(3)", "tried to end the process with exit status 3"),
    "exits_at_once": ("import os; os._exit(3)", "tried to end the process with exit status 3"),
    "raises": ("return 1 / 0", "raised ZeroDivisionError: division by zero"),
    "nan": ("return float('nan')", "returned a number that is not finite"),
    "text": ("return 'good'", "returned something that is not a number"),
    "nothing": ("return None", "returned something that is not a number"),
    "no_score": ("return {'accuracy': 1.0}", "returned a dict without 'score'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_function_that_fails(user: User, kind: str) -> None:
    """The function fails at the third response of step 2. The error names it, and the run can resume."""
    body, telling = REWARDS[kind]
    file = user.folder / "own_reward.py"
    good = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    file.write_text(
        "calls = 0\n" + good.replace("    return 1.0\n", "    global calls\n    calls += 1\n"
        f"    if calls == 15:\n        {body}\n    return 1.0\n")
    )  # fmt: skip
    words = (f"custom_reward_function.path={file}", "trainer.total_training_steps=3", "trainer.save_freq=1",
             "reward.num_workers=1")  # fmt: skip
    outcome = user.types(*words)
    assert outcome.status == 1
    assert f"the reward function compute_score ({file}) {telling}" in outcome.error
    assert "sample 2, row " in outcome.error
    assert "fix the reward function" in outcome.error
    file.write_text(good)
    assert goes_on(user, words, after=1) == [1, 2, 3]


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


# Trouble during training.


NOT_FINITE = {
    "loss": "log_probs = log_probs * float('nan')",
    "gradient norm": "log_probs = log_probs + (log_probs - log_probs.detach()).sqrt()",
}


@pytest.mark.parametrize("what", NOT_FINITE)
def test_a_loss_or_gradient_that_is_not_finite(user: User, what: str) -> None:
    """The run stops before the weights change, keeps the batch, and can be resumed."""
    file = user.folder / "own_loss.py"
    good = (
        "def loss(log_probs, old_log_probs, advantages):\n"
        "    return -advantages * (log_probs - old_log_probs).exp(), {}\n"
    )
    file.write_text(
        "updates = 0\n" + good.replace("    return", "    global updates\n    updates += 1\n"
        f"    if updates == 3:\n        {NOT_FINITE[what]}\n    return")
    )  # fmt: skip
    words = (f"{ACTOR}.policy_loss.loss_mode={file}:loss", f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
             "trainer.total_training_steps=3", "trainer.save_freq=1")  # fmt: skip
    outcome = user.types(*words)
    assert outcome.status == 1
    assert f"actor update 2: the {what} is not finite; no weight has changed" in outcome.error
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
    assert "Checkpoint skipped, trying the previous one" in resumed.said
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
    """Yield a checkpoints folder on a disk that can hold one checkpoint but not two."""
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
    assert "expected: about" in outcome.error and "MB free" in outcome.error
    assert "trainer.max_ckpt_to_keep" in outcome.error
    assert [path.name for path in small_disk.iterdir()] == ["step_000001"]
    assert open_checkpoint(small_disk / "step_000001").step == 1
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    assert goes_on(user, words, after=1) == [1, 2, 3]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("sent", "again"),
    [
        (signal.SIGINT, "Ctrl-C again"),
        pytest.param(signal.SIGTERM, "a second signal", marks=pytest.mark.slow),
    ],
)
def test_interrupted(shop: Shop, tmp_path: Path, sent: signal.Signals, again: str) -> None:
    """A real signal in the second step ends the step and saves; a message says how to resume."""
    folder = tmp_path / "run"
    words = shop.short("unused", f"trainer.default_local_dir={folder}", "trainer.total_training_steps=500")
    process = start(words, tmp_path)
    while count_steps(folder / "timeline.json") < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(sent)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    assert f"interrupted: this step is finished and saved first; {again} stops at once" in done.stderr
    (saved,) = (folder / "checkpoints").iterdir()
    assert f"saved {saved}; the same command resumes from it" in done.stdout
    steps = open_checkpoint(saved).step
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))

    resumed = finish(start([*words, f"trainer.total_training_steps={steps + 1}"], tmp_path))
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from {saved} after step {steps}" in resumed.stdout
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(1, steps + 2))


HANGS = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    Path(__file__).with_name("asked").touch()
    time.sleep(1000)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_stops_at_once(shop: Shop, tmp_path: Path, signals: int) -> None:
    """The signal is the first before the first step (here in the validation), or the second in a step."""
    (tmp_path / "hangs.py").write_text(HANGS)
    validates = f"trainer.val_before_train={str(signals == 1).lower()}"
    words = shop.short("unused", f"trainer.default_local_dir={tmp_path / 'run'}", validates)
    process = start([*words, f"custom_reward_function.path={tmp_path / 'hangs.py'}"], tmp_path)
    while not (tmp_path / "asked").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    assert "stopped; no checkpoint was saved" in done.stdout
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


STOPS = """
from tandem.workers.actor import ActorWorker

class Stops(ActorWorker):
    def update_actor(self, batch):
        breakpoint()
        return super().update_actor(batch)
"""


@pytest.mark.e2e
def test_a_breakpoint_in_a_worker(shop: Shop, tmp_path: Path) -> None:
    """On the local backend, a breakpoint stops in the process with the user's terminal, inside the worker."""
    (tmp_path / "stops.py").write_text(STOPS)
    words = (
        "trainer.backend=local",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"trainer.worker_classes.actor_rollout={tmp_path / 'stops.py'}:Stops",
    )
    process = start(shop.short("unused", *words), tmp_path, stdin=subprocess.PIPE)
    done = finish(process, typed="import os\np 'in', os.getpid(), self.rank, len(batch)\nc\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(Pdb) ") == 3, done.stdout
    assert f"('in', {process.pid}, 0, 12)" in done.stdout
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]


def count_steps(timeline: Path) -> int:
    if not timeline.exists():
        return 0
    return sum(event["ph"] == "B" and event["name"] == "step" for event in read_timeline(timeline))
