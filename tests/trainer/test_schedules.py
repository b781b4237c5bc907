"""Settings that change during a run: responses per prompt, and the coefficient of the entropy bonus."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.load import load_train_config
from tests.support.runs import Finished, Lab, same_weights, without_times

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ENTROPY = f"{ACTOR}.adaptive_entropy"


@pytest.fixture(scope="module")
def reward(lab: Lab) -> str:
    (lab.folder / "letters.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(set(solution_str)) / 6\n"
    )
    return f"custom_reward_function.path={lab.folder / 'letters.py'}"


def resumed(lab: Lab, name: str, *words: str, at: int) -> Finished:
    """Resume the run in another folder from its checkpoint of step `at`."""
    whole = lab.folder / name
    checkpoint = whole / "checkpoints" / f"step_{at:06d}"
    return lab.run(
        f"{name}_from_{at}",
        *words,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint}",
    )


GROUPS = (
    f"{ROLLOUT}.n=3",
    f"{ROLLOUT}.n_schedule={{4: 2, 2: 5}}",
    f"{ACTOR}.ppo_mini_batch_size=2",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
)


def test_group_sizes_follow_the_schedule_and_mini_batches_follow_them(lab: Lab, reward: str) -> None:
    words = (*GROUPS, reward, f"data.val_files={lab.val}", f"{ROLLOUT}.val_kwargs.n=1")
    run = lab.run("groups", *words)
    for step, n in ((1, 3), (2, 5), (3, 5), (4, 2)):
        samples = run.samples(step)
        assert len(samples["uid"]) == 4 * n
        assert samples["sample"] == list(range(n)) * 4
    assert run.actor.actor.version == 2 * 4
    rows = [row for row in run.rows if row["step"]]
    for row, after, n in zip(rows, rows[1:], (3, 5, 5), strict=False):
        error = min(max(row["actor/kl_in_reward"] / 0.1 - 1, -0.2), 0.2)
        assert after["actor/kl_coef"] == pytest.approx(row["actor/kl_coef"] * (1 + error * 4 * n / 100))
    again = resumed(lab, "groups", *words, at=2)
    assert same_weights(again, run)
    assert without_times(again.rows)[-2:] == without_times(run.rows)[-2:]


def test_the_resolved_config_reads_back_the_schedule(lab: Lab, tmp_path: Path) -> None:
    words = [f"{ROLLOUT}.n_schedule={{10: 4, 3: 2}}", f"{ROLLOUT}.n=8"]
    config = load_train_config(None, lab.overrides(tmp_path)[:-1] + words).config
    assert config.actor_rollout_ref.rollout.group_sizes == {1: 8, 3: 2, 10: 4}


def test_the_entropy_coefficient_rises_below_the_target_and_is_in_the_loss(lab: Lab, reward: str) -> None:
    words = (
        f"{ENTROPY}.enabled=true", f"{ENTROPY}.target_entropy=9", f"{ENTROPY}.delta_ent_coef=0.1",
        f"{ENTROPY}.max_ent_coef=0.25", f"{ACTOR}.entropy_coeff=0.05", "trainer.total_training_steps=4",
        "trainer.save_freq=2", reward,
    )  # fmt: skip
    run = lab.run("entropy", *words)
    coefficients = [row["actor/entropy_coeff"] for row in run.rows]
    assert coefficients == pytest.approx([0.05, 0.15, 0.25, 0.25])
    for row in run.rows:
        bonus = row["actor/entropy_coeff"] * row["actor/entropy"]
        assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"] - bonus, abs=1e-5)
    again = resumed(lab, "entropy", *words, at=2)
    assert same_weights(again, run)
    assert without_times(again.rows)[-2:] == without_times(run.rows)[-2:]


def test_above_the_target_there_is_no_bonus(lab: Lab, reward: str) -> None:
    run = lab.run(
        "entropy_off", f"{ENTROPY}.enabled=true", f"{ENTROPY}.target_entropy=0.01",
        f"{ACTOR}.entropy_coeff=0.005", f"{ENTROPY}.delta_ent_coef=0.002", "trainer.total_training_steps=3",
        reward,
    )  # fmt: skip
    assert [row["actor/entropy_coeff"] for row in run.rows] == [0.005, 0.0, 0.0]
    assert run.trainer.entropy is not None
    assert run.trainer.entropy.state_dict() == {"coefficient": 0.0, "active": False}
