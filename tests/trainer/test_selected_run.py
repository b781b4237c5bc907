import numpy as np
import pytest
import torch

from tandem.algorithms.registry import policy_loss
from tests.support.runs import same_weights


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
