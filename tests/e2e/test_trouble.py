"""What a user sees if something goes wrong in the middle of a run; and the same command resumes it."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.checkpoint import open_checkpoint
from tandem.observability.files import whole_lines
from tandem.observability.run import read_metrics
from tandem.protocol import DataProto
from tests.e2e.shop import finish, start
from tests.e2e.user import User

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def goes_on(user: User, words: tuple[str, ...], *, after: int) -> list[int]:
    outcome = user.types(*words)
    assert outcome.status == 0
    assert f"resumed from {outcome.folder}/checkpoints/step_{after:06d} after step {after}" in outcome.said
    return steps(outcome.folder)


def await_begun(process: subprocess.Popen[str], run: Path, phase: str, times: int = 1) -> None:
    timeline = run / "timeline.json"
    while not timeline.exists() or timeline.read_text("utf-8").count(f'"name": "{phase}", "ph": "B"') < times:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


def once(good: str, name: str, at: int, bad: str) -> str:
    count = f"    global {name}\n    {name} += 1\n    if {name} == {at}:\n        {bad}\n    return"
    return f"{name} = 0\n" + good.replace("    return", count, 1)


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
def test_a_reward_function_that_fails(user, kind):
    """The function fails at the third response of step 2. The error names it, and the run can resume."""
    body, telling = REWARDS[kind]
    file = user.folder / "own_reward.py"
    file.write_text(once(GOOD, "calls", 15, body))
    words = (f"custom_reward_function.path={file}", "trainer.total_training_steps=3", "trainer.save_freq=1",
             "reward.num_workers=1")  # fmt: skip
    outcome = user.types(*words)
    assert outcome.status == 1
    for text in (f"compute_score ({file}) {telling}", "sample 2, row ", "fix the reward function"):
        assert text in outcome.error
    file.write_text(GOOD)
    assert goes_on(user, words, after=1) == [1, 2, 3]


def test_a_batched_reward_of_the_wrong_length(user):
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


NOT_FINITE = {
    "loss": "log_probs = log_probs * float('nan')",
    "gradient norm": "log_probs = log_probs + (log_probs - log_probs.detach()).sqrt()",
}


@pytest.mark.parametrize("what", NOT_FINITE)
def test_a_loss_or_gradient_that_is_not_finite(user, what):
    file = user.folder / "own_loss.py"
    good = (
        "def loss(log_probs, old_log_probs, advantages):\n"
        "    return -advantages * (log_probs - old_log_probs).exp(), {}\n"
    )
    file.write_text(once(good, "updates", 3, NOT_FINITE[what]))
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


def test_a_damaged_checkpoint(user):
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
    assert steps(first.folder) == [1, 2]
    assert open_checkpoint(newest).step == 2

    for step in (1, 2):
        (first.folder / "checkpoints" / f"step_{step:06d}" / "state.pt").unlink()
    hopeless = user.types(*words)
    assert hopeless.status == 1
    assert "all checkpoints are damaged" in hopeless.error
    assert "trainer.resume_mode=disable" in hopeless.error
    assert steps(first.folder) == [1, 2]


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a disk here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.e2e
@pytest.mark.parametrize("size", ["4k", "16k", "28k", pytest.param("40k", marks=pytest.mark.slow)])
def test_a_disk_that_is_full(shop, tmp_path, size):
    """The disk is full at the start, before the first step, in it, or when samples are written."""
    with disk(tmp_path / "disk", size) as folder:
        words = shop.short("unused", f"trainer.default_local_dir={folder / 'run'}", "trainer.save_freq=1")
        done = finish(start(words, tmp_path))
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert f"{folder / 'run'}/" in done.stderr and "No space left on device" in done.stderr
        assert not (folder / "run" / "run.lock").exists()


@pytest.fixture
def small_disk(tmp_path):
    """Yield a checkpoints folder on a disk that can hold one checkpoint but not two."""
    with disk(tmp_path / "run" / "checkpoints", "700k") as folder:
        yield folder


def test_a_full_disk(user, small_disk):
    words = ("trainer.save_freq=1", "trainer.total_training_steps=3")
    outcome = user.types(*words)
    assert outcome.status == 1
    for text in (f"{small_disk}: the disk is full", "MB free", "trainer.max_ckpt_to_keep"):
        assert text in outcome.error
    assert [path.name for path in small_disk.iterdir()] == ["step_000001"]
    assert open_checkpoint(small_disk / "step_000001").step == 1
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    assert goes_on(user, words, after=1) == [1, 2, 3]


@pytest.mark.e2e
@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted(shop, tmp_path, sent):
    folder = tmp_path / "run"
    words = shop.short("unused", f"trainer.default_local_dir={folder}", "trainer.total_training_steps=500")
    process = start(words, tmp_path)
    await_begun(process, folder, "step", 2)
    process.send_signal(sent)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    assert ("Ctrl-C again" if sent == signal.SIGINT else "a second signal") in done.stderr
    (saved,) = (folder / "checkpoints").iterdir()
    assert f"saved {saved}; the same command resumes from it" in done.stdout
    last = open_checkpoint(saved).step
    assert steps(folder) == list(range(1, last + 1))

    resumed = finish(start([*words, f"trainer.total_training_steps={last + 1}"], tmp_path))
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from {saved} after step {last}" in resumed.stdout
    assert steps(folder) == list(range(1, last + 2))


HANGS = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    Path(__file__).with_name("asked").touch()
    time.sleep(1000)
"""
PROMPT_S = 5.0
"""The time limit for a reaction. It takes one second, but a busy machine needs longer."""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("validates", "signals", "apart_s"),
    [
        (True, [signal.SIGTERM], 0),
        (False, [signal.SIGTERM, signal.SIGTERM], 0.3),
        (False, [signal.SIGINT, signal.SIGTERM], 0.02),
        (False, [signal.SIGINT, signal.SIGTERM], 1.0),
    ],
)
def test_a_signal_before_the_first_step_or_the_second_in_it_stops_at_once(
    shop, tmp_path, validates, signals, apart_s
):
    """The first signal in a step waits for the step, which never ends in this test."""
    (tmp_path / "hangs.py").write_text(HANGS)
    run, reward = tmp_path / "run", tmp_path / "hangs.py"
    words = (f"trainer.default_local_dir={run}", f"trainer.val_before_train={str(validates).lower()}")
    process = start(shop.short("unused", *words, f"custom_reward_function.path={reward}"), tmp_path)
    while not (tmp_path / "asked").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    for sent in signals:
        time.sleep(apart_s)
        began = time.monotonic()
        process.send_signal(sent)
    done = finish(process)
    assert time.monotonic() - began < PROMPT_S
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.endswith("stopped\n")
    assert "stopped; no checkpoint was saved" in done.stdout
    assert list((run / "checkpoints").iterdir()) == [] and not (run / "run.lock").exists()
    assert "stopped" in whole_lines(run / "log" / "run.log")[-1]
    last = json.loads(whole_lines(run / "events.jsonl")[-1])
    assert (last["event"], last["how"]) == ("end", "interrupted")


STOPS = """
from tandem.workers.actor import ActorWorker

class Stops(ActorWorker):
    def update_actor(self, batch):
        breakpoint()
        return super().update_actor(batch)
"""


@pytest.mark.e2e
def test_a_breakpoint_in_a_worker(shop, tmp_path):
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
    assert steps(tmp_path / "run") == [1]


SLOW = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.2)
    return len(set(solution_str)) / 6
"""


def test_a_second_process_is_refused_until_the_first_is_killed(shop, tmp_path):
    reward = tmp_path / "slow.py"
    reward.write_text(SLOW)
    run = tmp_path / "run"
    words = shop.short("run", f"trainer.default_local_dir={run}", f"custom_reward_function.path={reward}",
                       "trainer.save_freq=1", "trainer.total_training_steps=2")  # fmt: skip
    first = start([*words, "trainer.total_training_steps=50"], tmp_path)
    try:
        await_begun(first, run, "step", 2)
        second = finish(start(words, tmp_path))
        assert second.returncode == 1
        for text in ("trainer.default_local_dir", f"process {first.pid} on ", f"kill {first.pid}"):
            assert text in second.stderr
        assert first.poll() is None
        os.kill(first.pid, signal.SIGKILL)
    finally:
        first.kill()
        first.communicate()
    saved = len(list((run / "checkpoints").glob("step_??????")))
    third = finish(start([*words, f"trainer.total_training_steps={saved + 1}"], tmp_path))
    assert third.returncode == 0, third.stderr
    assert "resumed from" in third.stdout
    assert steps(run) == list(range(1, saved + 2))
    assert not (run / "run.lock").exists()


def test_another_experiment_does_not_go_on_from_this_one(user):
    first = user.types("trainer.total_training_steps=2", "trainer.save_freq=1")
    config = (first.folder / "config.yaml").read_text()
    other = ("algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.optim.lr=0.5",
             "trainer.total_training_steps=3", "trainer.save_freq=1")  # fmt: skip
    refused = user.types(*other)
    assert refused.status == 1
    lines = [line.split() for line in refused.error.splitlines()]
    assert ["algorithm.adv_estimator", '"grpo"', '"rloo"'] in lines
    assert ["actor_rollout_ref.actor.optim.lr", "1e-06", "0.5"] in lines
    assert not any("total_training_steps" in line for line in lines)
    assert "trainer.resume_with_changes=true" in refused.error
    assert (first.folder / "config.yaml").read_text() == config
    assert steps(first.folder) == [1, 2]
    allowed = user.types(*other, "trainer.resume_with_changes=true")
    assert allowed.status == 0
    assert "algorithm.adv_estimator" in allowed.said and "after step 2" in allowed.said


def test_a_change_that_changes_nothing_of_what_is_learnt_is_said(user):
    words = ("trainer.save_freq=1",)
    user.types(*words, "trainer.total_training_steps=1")
    longer = user.types(*words, "trainer.total_training_steps=2")
    assert longer.status == 0
    assert "trainer.total_training_steps (1, now 2)" in longer.said
