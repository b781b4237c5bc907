import numpy as np
import pytest
import torch

from tandem.algorithms.registry import policy_loss
from tests.support.runs import same_weights, without_times


def check_resumed(lab, run, *words, at):
    """Check the run that goes on in another folder from the run's checkpoint of step `at`."""
    start = f"trainer.resume_mode=resume_path trainer.resume_from_path={run.folder}/checkpoints/step_{at:06d}"
    again = lab.run(f"{run.folder.name}_from_{at}", *words, start)
    assert same_weights(again, run)
    assert without_times(again.rows)[-2:] == without_times(run.rows)[-2:]


@pytest.mark.slow
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


def words(lab, loss, **options):
    keys = (f"A.policy_loss.{name}={value}" for name, value in options.items())
    return f"A.policy_loss.loss_mode={loss} {' '.join(keys)} {lab.letters}"


def test_tokens_that_are_silenced_do_not_learn(lab):
    """With one update per batch, old log-probs are computed only because the selection reads them."""
    still = "A.optim.weight_decay=0 steps=1"
    all_of_them = words(lab, "clip_cov", clip_cov_ratio=1.0, clip_cov_lb=-1e9, clip_cov_ub=1e9)
    silent = lab.run("silent", all_of_them, still)
    frozen = lab.run("frozen", words(lab, "vanilla"), "A.optim.lr=0", still)
    assert silent.rows[-1]["actor/selected"] == 1 and silent.rows[-1]["actor/grad_norm"] == 0
    assert same_weights(silent, frozen)
    none = lab.run("none", words(lab, "clip_cov", clip_cov_lb=1e8, clip_cov_ub=1e9), still)
    assert none.rows[-1]["actor/selected"] == 0 and not same_weights(none, frozen)


def test_the_choice_is_made_over_the_whole_batch(lab):
    run = lab.run("updates", words(lab, "kl_cov", kl_cov_ratio=0.2), "A.ppo_mini_batch_size=2")
    spec = policy_loss("kl_cov")
    assert spec.selection is not None
    for step in (1, 2):
        samples = run.samples(step)
        flat = {
            name: torch.tensor(np.concatenate(samples[name]))
            for name in ("old_log_probs", "advantages", "response_mask", "selected_tokens")
        }
        assert torch.equal(spec.selection(flat, {"kl_cov_ratio": 0.2}), flat["selected_tokens"])
        assert int(flat["selected_tokens"].sum()) == int(0.2 * int(flat["response_mask"].sum())) > 1
        assert run.rows[step - 1]["actor/selected"] > 0


def test_micro_batches_do_not_change_what_is_chosen(lab):
    keys = words(lab, "clip_cov", clip_cov_ratio=0.3, clip_cov_lb=-1e9, clip_cov_ub=1e9)
    whole, cut = lab.run("whole", keys), lab.run("cut", keys, "A.ppo_micro_batch_size_per_gpu=1")
    assert whole.samples(1)["selected_tokens"] == cut.samples(1)["selected_tokens"]
    for name in ("actor/loss", "actor/selected", "actor/grad_norm"):
        assert whole.rows[0][name] == pytest.approx(cut.rows[0][name], rel=1e-4), name
