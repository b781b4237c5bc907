"""What a user sees if something goes wrong in the middle of a run; and the same command resumes it."""

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest

from tandem.checkpoint import open_checkpoint
from tandem.observability.files import whole_lines
from tandem.observability.run import read_metrics
from tandem.protocol import DataProto
from tests.e2e.shop import finish, start
from tests.support.marks import slow_but

SAVING = "trainer.save_freq=1"


def steps(folder):
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def fails(user, *words):
    outcome = user.types(*words)
    assert outcome.status == 1
    return outcome


def goes_on(user, *words):
    """Check that the same command resumes after step 1 and takes three steps in all."""
    outcome = user.types(*words)
    assert outcome.status == 0
    assert f"resumed from {outcome.folder}/checkpoints/step_000001 after step 1" in outcome.said
    assert steps(outcome.folder) == [1, 2, 3]


def await_begun(process, run, phase, times=1):
    timeline = run / "timeline.json"
    while not timeline.exists() or timeline.read_text("utf-8").count(f'"name": "{phase}", "ph": "B"') < times:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


def once(good, name, at, bad):
    """Return a program whose function counts its calls, and does something bad at one of them."""
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
def test_a_reward_function_that_fails_at_the_third_response_of_step_2(user, kind):
    body, telling = REWARDS[kind]
    file = user.folder / "own_reward.py"
    file.write_text(once(GOOD, "calls", 15, body))
    words = f"custom_reward_function.path={file} steps=3 {SAVING} reward.num_workers=1"
    outcome = fails(user, words)
    for text in (f"compute_score ({file}) {telling}", "sample 2, row ", "fix the reward function"):
        assert text in outcome.error
    file.write_text(GOOD)
    goes_on(user, words)


def test_a_batched_reward_of_the_wrong_length(user):
    file = user.folder / "batched.py"
    file.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [1.0] * (len(solution_strs) - 1)\n"
        "compute_score.batched = True\n"
    )
    assert "11 scores for 12 responses" in fails(user, f"custom_reward_function.path={file}").error


GOOD_LOSS = """
def loss(log_probs, old_log_probs, advantages):
    return -advantages * (log_probs - old_log_probs).exp(), {}
"""
NOT_FINITE = {
    "loss": "log_probs = log_probs * float('nan')",
    "gradient norm": "log_probs = log_probs + (log_probs - log_probs.detach()).sqrt()",
}


@pytest.mark.parametrize("what", NOT_FINITE)
def test_a_loss_or_gradient_that_is_not_finite(user, what):
    file = user.folder / "own_loss.py"
    file.write_text(once(GOOD_LOSS, "updates", 3, NOT_FINITE[what]))
    words = f"A.policy_loss.loss_mode={file}:loss A.ppo_max_token_len_per_gpu=1000 steps=3 {SAVING}"
    outcome = fails(user, words)
    assert f"actor update 2: the {what} is not finite; no weight has changed" in outcome.error
    saved = outcome.folder / "log" / "actor_update_2_rank_0.pt"
    assert f"DataProto.load('{saved}')" in outcome.error
    culprit = DataProto.load(saved)
    assert len(culprit) == 6
    assert {"tokens", "advantages", "old_log_probs", "response_mask"} <= set(culprit.batch)
    file.write_text(GOOD_LOSS)
    goes_on(user, words)


@contextmanager
def disk(folder, size):
    """Mount a small disk at a new folder."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a disk here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.e2e
@pytest.mark.parametrize("size", slow_but(["16k"], ["4k", "16k", "28k", "40k"]))
def test_a_disk_that_is_full(shop, tmp_path, size):
    """The disk is full at the start, before the first step, in it, or when samples are written."""
    with disk(tmp_path / "disk", size) as folder:
        words = shop.short("unused", f"trainer.default_local_dir={folder / 'run'}", SAVING)
        done = finish(start(words, tmp_path))
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert f"{folder / 'run'}/" in done.stderr and "No space left on device" in done.stderr
        assert not (folder / "run" / "run.lock").exists()


def test_a_disk_that_can_hold_one_checkpoint_but_not_two(user):
    with disk(user.folder / "run" / "checkpoints", "700k") as folder:
        outcome = fails(user, "steps=3", SAVING)
        for text in (f"{folder}: the disk is full", "MB free", "trainer.max_ckpt_to_keep"):
            assert text in outcome.error
        assert [path.name for path in folder.iterdir()] == ["step_000001"]
        assert open_checkpoint(folder / "step_000001").step == 1
        subprocess.run(["mount", "-o", "remount,size=10m", str(folder)], check=True)
        goes_on(user, "steps=3", SAVING)


@pytest.mark.e2e
@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted(shop, tmp_path, sent):
    folder = tmp_path / "run"
    words = shop.short("unused", f"trainer.default_local_dir={folder} steps=500")
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
PROMPT_S = 5.0  # a reaction takes one second, but a busy machine needs longer


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("validates", "signals", "apart_s"),
    [
        ("true", [signal.SIGTERM], 0),
        ("false", [signal.SIGTERM, signal.SIGTERM], 0.3),
        ("false", [signal.SIGINT, signal.SIGTERM], 0.02),
        pytest.param("false", [signal.SIGINT, signal.SIGTERM], 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_before_the_first_step_or_the_second_in_it_stops_at_once(
    shop, tmp_path, validates, signals, apart_s
):
    """The first signal in a step waits for the step, which never ends in this test."""
    run, reward = tmp_path / "run", tmp_path / "hangs.py"
    reward.write_text(HANGS)
    words = f"trainer.default_local_dir={run} trainer.val_before_train={validates}"
    process = start(shop.short("unused", words, f"custom_reward_function.path={reward}"), tmp_path)
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
    words = f"trainer.backend=local trainer.default_local_dir={tmp_path / 'run'} A.ppo_mini_batch_size=4"
    worker = f"W.actor_rollout={tmp_path / 'stops.py'}:Stops"
    process = start(shop.short("unused", words, worker), tmp_path, stdin=subprocess.PIPE)
    done = finish(process, typed="import os\np 'in', os.getpid(), self.rank, len(batch)\nc\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(Pdb) ") == 3, done.stdout
    assert f"('in', {process.pid}, 0, 12)" in done.stdout
    assert steps(tmp_path / "run") == [1]


@pytest.mark.slow
def test_a_second_process_is_refused_until_the_first_is_killed(shop, tmp_path):
    reward, run = tmp_path / "slow.py", tmp_path / "run"
    reward.write_text("import time\n" + GOOD.replace("    return", "    time.sleep(0.2)\n    return"))
    words = f"trainer.default_local_dir={run} custom_reward_function.path={reward} {SAVING} steps="
    first = start(shop.short("unused", f"{words}50"), tmp_path)
    try:
        await_begun(first, run, "step", 2)
        second = finish(start(shop.short("unused", f"{words}2"), tmp_path))
        assert second.returncode == 1
        for text in ("trainer.default_local_dir", f"process {first.pid} on ", f"kill {first.pid}"):
            assert text in second.stderr
        assert first.poll() is None
        os.kill(first.pid, signal.SIGKILL)
    finally:
        first.kill()
        first.communicate()
    saved = len(list((run / "checkpoints").glob("step_??????")))
    third = finish(start(shop.short("unused", f"{words}{saved + 1}"), tmp_path))
    assert third.returncode == 0, third.stderr
    assert "resumed from" in third.stdout
    assert steps(run) == list(range(1, saved + 2))
    assert not (run / "run.lock").exists()


@pytest.mark.slow
def test_another_experiment_does_not_go_on_from_this_one(user):
    """Keys that do not change what is learnt may differ, which is said."""
    user.types("steps=1", SAVING)
    longer = user.types("steps=2", SAVING)
    assert longer.status == 0 and "trainer.total_training_steps (1, now 2)" in longer.said
    config = (longer.folder / "config.yaml").read_text()
    other = ("algorithm.adv_estimator=rloo A.optim.lr=0.5 steps=3", SAVING)
    refused = fails(user, *other)
    lines = [line.split() for line in refused.error.splitlines()]
    assert ["algorithm.adv_estimator", '"grpo"', '"rloo"'] in lines
    assert ["actor_rollout_ref.actor.optim.lr", "1e-06", "0.5"] in lines
    assert not any("total_training_steps" in line for line in lines)
    assert "trainer.resume_with_changes=true" in refused.error
    assert (longer.folder / "config.yaml").read_text() == config
    assert steps(longer.folder) == [1, 2]
    allowed = user.types(*other, "trainer.resume_with_changes=true")
    assert allowed.status == 0
    assert "algorithm.adv_estimator" in allowed.said and "after step 2" in allowed.said
