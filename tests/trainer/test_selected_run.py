"""A token selection over the whole batch, in a whole run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.algorithms.registry import policy_loss
from tests.support.runs import Lab, same_weights

LOSS = "actor_rollout_ref.actor.policy_loss"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"


@pytest.fixture(autouse=True, scope="module")
def length_reward(lab: Lab) -> None:
    """Write a reward that differs between samples even for an untrained model."""
    (lab.folder / "length_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(set(solution_str)) / 6\n"
    )


def words(lab: Lab, loss: str, *more: str) -> list[str]:
    return [
        f"{LOSS}.loss_mode={loss}",
        f"custom_reward_function.path={lab.folder / 'length_reward.py'}",
        *more,
    ]


def test_tokens_that_are_silenced_do_not_learn(lab: Lab) -> None:
    """If all tokens are excluded, the weights do not change.

    With one update per batch, old log-probs are computed only because the selection reads them.
    """
    everything = (f"{LOSS}.clip_cov_ratio=1.0", f"{LOSS}.clip_cov_lb=-1e9", f"{LOSS}.clip_cov_ub=1e9")
    still = ("actor_rollout_ref.actor.optim.weight_decay=0", "trainer.total_training_steps=1")
    silent = lab.run("silent", *words(lab, "clip_cov", *everything, *still))
    frozen = lab.run("frozen", *words(lab, "vanilla", "actor_rollout_ref.actor.optim.lr=0", *still))
    assert silent.rows[-1]["actor/selected"] == 1 and silent.rows[-1]["actor/grad_norm"] == 0
    assert same_weights(silent, frozen)
    none = lab.run(
        "none", *words(lab, "clip_cov", f"{LOSS}.clip_cov_lb=1e8", f"{LOSS}.clip_cov_ub=1e9", *still)
    )
    assert none.rows[-1]["actor/selected"] == 0 and not same_weights(none, frozen)


def test_the_choice_is_made_over_the_whole_batch(lab: Lab) -> None:
    """The samples on disk have the selection as a column, and two updates read it."""
    run = lab.run("updates", *words(lab, "kl_cov", f"{LOSS}.kl_cov_ratio=0.2", f"{MINI}=2"))
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


def test_micro_batches_do_not_change_what_is_chosen(lab: Lab) -> None:
    keys = [f"{LOSS}.clip_cov_ratio=0.3", f"{LOSS}.clip_cov_lb=-1e9", f"{LOSS}.clip_cov_ub=1e9"]
    whole = lab.run("whole", *words(lab, "clip_cov", *keys))
    cut = lab.run("cut", *words(lab, "clip_cov", *keys, f"{MICRO}=1"))
    assert whole.samples(1)["selected_tokens"] == cut.samples(1)["selected_tokens"]
    for name in ("actor/loss", "actor/selected", "actor/grad_norm"):
        assert whole.rows[0][name] == pytest.approx(cut.rows[0][name], rel=1e-4), name
