"""A run folder belongs to one process and to one experiment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tandem.observability.run import read_metrics
from tests.e2e.shop import Shop, finish, start
from tests.e2e.user import User

SLOW = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.2)
    return len(set(solution_str)) / 6
"""


def test_a_second_process_is_refused_until_the_first_is_killed(shop: Shop, tmp_path: Path) -> None:
    reward = tmp_path / "slow.py"
    reward.write_text(SLOW)
    run = tmp_path / "run"
    words = shop.short("run", f"trainer.default_local_dir={run}", f"custom_reward_function.path={reward}",
                       "trainer.save_freq=1", "trainer.total_training_steps=2")  # fmt: skip
    first = start([*words, "trainer.total_training_steps=50"], tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        second = finish(start(words, tmp_path))
        assert second.returncode == 1
        assert "trainer.default_local_dir: another process is writing" in second.stderr
        assert f"process {first.pid} on " in second.stderr
        assert f"kill {first.pid}" in second.stderr
        assert first.poll() is None
        os.kill(first.pid, signal.SIGKILL)
    finally:
        first.kill()
        first.communicate()
    steps = len(list((run / "checkpoints").glob("step_*")))
    third = finish(start([*words, f"trainer.total_training_steps={steps + 1}"], tmp_path))
    assert third.returncode == 0, third.stderr
    assert "resumed from" in third.stdout
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 2))
    assert not (run / "run.lock").exists()


def test_another_experiment_does_not_go_on_from_this_one(user: User) -> None:
    steps = ("trainer.total_training_steps=2", "trainer.save_freq=1")
    first = user.types(*steps)
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
    assert [row["step"] for row in read_metrics(first.folder / "metrics.jsonl")] == [1, 2]
    allowed = user.types(*other, "trainer.resume_with_changes=true")
    assert allowed.status == 0
    assert "algorithm.adv_estimator" in allowed.said
    assert "after step 2" in allowed.said


def test_a_change_that_changes_nothing_of_what_is_learnt_is_said(user: User) -> None:
    words = ("trainer.save_freq=1",)
    user.types(*words, "trainer.total_training_steps=1")
    longer = user.types(*words, "trainer.total_training_steps=2")
    assert longer.status == 0
    assert "trainer.total_training_steps (1, now 2)" in longer.said
