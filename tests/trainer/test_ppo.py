import math
from itertools import groupby

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.runs import same_weights


def test_a_step_reports_the_fields_names_and_writes_its_samples(lab):
    run = lab.run("names", f"trainer.test_freq=1 data.val_files={lab.val} trainer.save_freq=2")
    rows = run.rows
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"val/accuracy", "val/accuracy/arithmetic", "val/reward"} <= set(rows[0])
    for name in (
        "timing/gen", "timing/generate_sequences", "timing/reshard", "timing/reward", "timing/adv",
        "timing/update_actor", "timing/step", "timing/testing", "timing_per_token_ms/gen",
        "perf/gen_tokens_per_s_per_device", "perf/train_tokens_per_s_per_device", "perf/step_tokens_per_s",
        "reward/mean", "response_length/mean", "actor/loss", "actor/clip_fraction", "actor/entropy",
        "actor/grad_norm", "actor/lr", "rollout/log_prob_diff_mean", "rollout/log_prob_diff_max",
    ):  # fmt: skip
        assert name in rows[1], name
    assert "timing/save_checkpoint" in rows[2]
    assert len(run.samples(1)["tokens"]) == 12
    assert {"advantages", "scores", "uid", "response_text"} <= set(run.samples(1))
    for tokens, mask, log_probs in run.each(1, "tokens", "response_mask", "rollout_log_probs"):
        assert len(tokens) == len(mask) == len(log_probs)
        assert all(p <= 0 and (m or p == 0) for p, m in zip(log_probs, mask, strict=True))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(lab):
    words = f"{lab.letters} A.ppo_mini_batch_size=2 trainer.seed="
    first, again, other = (lab.run(f"seed_{i}", f"{words}{seed}") for i, seed in enumerate((3, 3, 4)))
    assert first.samples(2)["tokens"] == again.samples(2)["tokens"] != other.samples(2)["tokens"]
    assert same_weights(first, again) and not same_weights(first, other)
    assert all(0 < row["rollout/log_prob_diff_max"] <= 1e-4 for row in first.rows)


def test_a_bandit_is_learnt(lab):
    reward = lab.reward("float(response.startswith('7'))")
    run = lab.run("bandit", reward, "data.max_response_length=2 R.n=16 A.optim.lr=0.02 steps=25")
    rewards = [row["reward/mean"] for row in run.rows]
    assert rewards[0] < 0.2
    assert sum(rewards[-3:]) / 3 > 0.9


def test_critic_warm_up_leaves_the_policy_alone(lab):
    first, second = lab.run("warm", "GAE trainer.critic_warmup=1").rows
    assert "critic/loss" in first and "actor/loss" not in first and "actor/loss" in second


@pytest.mark.equation("parts/apply_kl_penalty")
def test_reference_values_and_kl_match_a_second_look(lab):
    run = lab.run("kl", "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.3 steps=3")
    for token in run.tokens(3):
        expected = token["token_level_scores"] - 0.3 * (token["old_log_probs"] - token["ref_log_probs"])
        assert token["token_level_rewards"] == pytest.approx(expected, abs=1e-6)
    for mask, rewards in run.each(3, "response_mask", "token_level_rewards"):
        assert not any(reward for m, reward in zip(mask, rewards, strict=True) if not m)
    assert abs(run.rows[2]["actor/kl"]) > 1e-6
    assert run.rows[2]["actor/kl"] == run.rows[2]["actor/kl_in_reward"]
    assert run.rows[2]["actor/kl_coef"] == 0.3


def test_files_of_samples_have_each_tokens_entropy_and_change_nothing_of_what_is_learnt(lab):
    words = "algorithm.use_kl_in_reward=true R.temperature=0.7"
    run, without = lab.run("entropy", words), lab.run("no_entropy", words, "trainer.samples_freq=-1")
    assert same_weights(run, without)
    model = AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.float64)
    written = []
    for tokens, mask, found in run.each(1, "tokens", "response_mask", "entropy"):
        logits = model(torch.tensor([tokens])).logits[0, :-1].detach() / 0.7
        wanted = torch.distributions.Categorical(logits=logits).entropy()
        own = torch.tensor(mask[1:])
        torch.testing.assert_close(torch.tensor(found[1:])[own].double(), wanted[own], rtol=1e-5, atol=1e-5)
        written += wanted[own].tolist()
    assert run.rows[0]["actor/entropy"] == pytest.approx(np.mean(written), abs=1e-5)


def test_numbers_of_a_reward_stand_apart_from_the_runs_own(lab):
    row = lab.run("many", lab.reward("{'score': 0.0, 'max': 5.0, 'mean': 7.0}")).rows[0]
    assert (row["reward/mean"], row["reward/max"]) == (0.0, 0.0)
    assert (row["reward/extra/mean"], row["reward/extra/max"]) == (7.0, 5.0)


def test_the_schedule_counts_training_steps_whatever_the_mini_batches(lab):
    words = "A.ppo_mini_batch_size=2 A.ppo_epochs=2 A.optim.lr=0.01 A.optim.lr_warmup_steps=2"
    run = lab.run("schedule", words, "A.optim.lr_scheduler_type=linear steps=6")
    rates = [row["actor/lr"] for row in run.rows]
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])


SPOILT = """
from tandem.algorithms.advantages.grpo import grpo
calls = []
def spoilt(token_level_rewards, response_mask, offsets, group):
    calls.append(1)
    found = grpo(token_level_rewards, response_mask, offsets, group)
    if len(calls) == 2:
        found.advantages[response_mask.nonzero()[0]] = float('nan')
    return found
"""


def test_a_run_skips_a_step_whose_gradient_is_not_finite(lab):
    """One of the two updates of the second step is bad; the metrics count it from then on."""
    (lab.folder / "spoilt.py").write_text(SPOILT)
    words = "A.ppo_mini_batch_size=2 A.optim.skip_non_finite_steps=1 steps=3"
    run = lab.run("skips", f"algorithm.adv_estimator={lab.folder}/spoilt.py:spoilt {words}")
    assert [row["actor/skipped_steps"] for row in run.rows] == [0, 1, 1]
    assert all(isinstance(row["actor/loss"], float) for row in run.rows)
    (line,) = (line for line in run.log.splitlines() if "skipped" in line)
    assert "actor update 2: the loss is not finite" in line and "actor_update_2_rank_0.pt" in line
    assert run.actor.actor.version == 5


@pytest.mark.equation("advantages/vtrace")
def test_the_targets_of_vtrace_are_those_of_the_files_own_columns(lab):
    """With top_k=3, the samples do not come from exactly the policy."""
    words = "algorithm.adv_estimator=vtrace algorithm.gamma=0.9 R.top_k=3"
    run = lab.run("vtrace", words, "algorithm.adv_kwargs={rho_bar: 1.5, c_bar: 0.5}")
    assert "critic/explained_variance" in run.rows[-1]
    seen = 0
    for sample, tokens in groupby(run.tokens(2)[::-1], lambda token: token["sample"]):
        following = value = 0.0
        for token in tokens:
            weight = math.exp(token["old_log_probs"] - token["rollout_log_probs"])
            seen += weight < 0.99
            reward, own = token["token_level_rewards"], token["values"]
            advantage = min(1.5, weight) * (reward + 0.9 * following - own)
            surprise = min(1.5, weight) * (reward + 0.9 * value - own)
            target = own + surprise + 0.9 * min(0.5, weight) * (following - value)
            assert token["returns"] == pytest.approx(target, abs=1e-5), sample
            assert token["advantages"] == pytest.approx(advantage, abs=1e-5), sample
            following, value = target, own
    assert seen > 0
