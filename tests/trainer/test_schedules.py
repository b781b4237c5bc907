import pytest

from tests.support.runs import same_weights, without_times


def check_resumed(lab, run, *words, at):
    """Check the run that goes on in another folder from the run's checkpoint of step `at`."""
    start = f"trainer.resume_mode=resume_path trainer.resume_from_path={run.folder}/checkpoints/step_{at:06d}"
    again = lab.run(f"{run.folder.name}_from_{at}", *words, start)
    assert same_weights(again, run)
    assert without_times(again.rows)[-2:] == without_times(run.rows)[-2:]


def test_group_sizes_follow_the_schedule_and_mini_batches_follow_them(lab):
    sizes = "R.n=3 R.n_schedule={4: 2, 2: 5} A.ppo_mini_batch_size=2"
    words = (sizes, "GAE ADAPTIVE steps=4 trainer.save_freq=1", lab.letters, lab.validated)
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
    check_resumed(lab, run, *words, at=2)


def test_the_entropy_coefficient_rises_below_the_target_and_is_in_the_loss(lab):
    adaptive = "{enabled: true, target_entropy: 9, delta_ent_coef: 0.1, max_ent_coef: 0.25}"
    words = (f"A.adaptive_entropy={adaptive} A.entropy_coeff=0.05 steps=4 trainer.save_freq=2", lab.letters)
    run = lab.run("entropy", *words)
    coefficients = [row["actor/entropy_coeff"] for row in run.rows]
    assert coefficients == pytest.approx([0.05, 0.15, 0.25, 0.25])
    for row in run.rows:
        bonus = row["actor/entropy_coeff"] * row["actor/entropy"]
        assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"] - bonus, abs=1e-5)
    check_resumed(lab, run, *words, at=2)


def test_above_the_target_there_is_no_bonus(lab):
    adaptive = "A.adaptive_entropy={enabled: true, target_entropy: 0.01, delta_ent_coef: 0.002}"
    run = lab.run("entropy_off", adaptive, "A.entropy_coeff=0.005 steps=3", lab.letters)
    assert [row["actor/entropy_coeff"] for row in run.rows] == [0.005, 0.0, 0.0]
    assert run.trainer.entropy.state_dict() == {"coefficient": 0.0, "active": False}
