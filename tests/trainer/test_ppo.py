"""The loop on a real model: what a step writes, that it learns, and that all families of algorithms run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.runs import Lab, same_weights

FAMILY = ["gae", "vtrace", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


@pytest.mark.parametrize("estimator", FAMILY)
def test_every_estimator_runs_through_the_loop_and_moves_the_weights(lab: Lab, estimator: str) -> None:
    before = lab.run(
        f"still_{estimator}",
        f"algorithm.adv_estimator={estimator}",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.optim.lr=0",
    )
    after = lab.run(
        f"family_{estimator}",
        f"algorithm.adv_estimator={estimator}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        f"custom_reward_function.path={lab.folder / 'length_reward.py'}",
    )
    assert [row["step"] for row in after.rows] == [1, 2]
    start, end = before.weights(), after.weights()
    assert any(not torch.equal(start[name], end[name]) for name in start)
    last = after.rows[-1]
    for name in ("actor/loss", "actor/grad_norm", "actor/kl", "actor/entropy", "reward/mean", "timing/step"):
        assert math.isfinite(last[name]), name
    assert ("critic/loss" in last) == (estimator in ("gae", "vtrace"))


@pytest.fixture(autouse=True, scope="module")
def length_reward(lab: Lab) -> None:
    """Write a reward that differs between samples even for an untrained model."""
    (lab.folder / "length_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(set(solution_str)) / 6\n"
    )


def test_a_step_reports_the_fields_names_and_writes_its_samples(lab: Lab) -> None:
    run = lab.run("names", "trainer.test_freq=1", f"data.val_files={lab.val}", "trainer.save_freq=2")
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
    samples = run.samples(1)
    assert len(samples["tokens"]) == 12
    assert {"advantages", "rollout_log_probs", "response_mask", "scores", "uid", "response_text"} <= set(
        samples
    )
    for tokens, mask, log_probs in zip(
        samples["tokens"], samples["response_mask"], samples["rollout_log_probs"], strict=True
    ):
        assert len(tokens) == len(mask) == len(log_probs)
        assert all(p == 0 for p, m in zip(log_probs, mask, strict=True) if not m)
        assert all(p <= 0 for p in log_probs)


def test_rollout_and_training_agree_on_the_log_probs(lab: Lab) -> None:
    run = lab.run("agree", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    assert all(0 < row["rollout/log_prob_diff_max"] <= 1e-4 for row in run.rows)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(lab: Lab) -> None:
    first, again, other = (lab.run(f"seed_{i}", f"trainer.seed={seed}") for i, seed in enumerate((3, 3, 4)))
    assert first.samples(2)["tokens"] == again.samples(2)["tokens"]
    a, b = first.weights(), again.weights()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert first.samples(2)["tokens"] != other.samples(2)["tokens"]


def test_a_bandit_is_learnt(lab: Lab) -> None:
    """Responses that start with a 7 are rewarded, and the policy learns to write them."""
    (lab.folder / "seven.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str.startswith('7'))\n"
    )
    run = lab.run(
        "bandit",
        f"custom_reward_function.path={lab.folder / 'seven.py'}",
        "data.max_response_length=2",
        "actor_rollout_ref.rollout.n=16",
        "actor_rollout_ref.actor.optim.lr=0.02",
        "trainer.total_training_steps=25",
    )
    rewards = [row["reward/mean"] for row in run.rows]
    assert rewards[0] < 0.2
    assert sum(rewards[-3:]) / 3 > 0.9


def test_critic_warm_up_leaves_the_policy_alone(lab: Lab) -> None:
    run = lab.run("warm", "algorithm.adv_estimator=gae", "trainer.critic_warmup=1")
    assert "actor/loss" not in run.rows[0]
    assert "critic/loss" in run.rows[0]
    assert "actor/loss" in run.rows[1]


@pytest.mark.equation("parts/apply_kl_penalty")
def test_reference_values_and_kl_match_a_second_look(lab: Lab) -> None:
    """With KL in the reward, token rewards are scores minus coef · (old - ref) of the columns in the file."""
    run = lab.run(
        "kl",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.3",
        "trainer.total_training_steps=3",
    )
    samples = run.samples(3)
    for i, mask in enumerate(samples["response_mask"]):
        for t, m in enumerate(mask):
            gap = samples["old_log_probs"][i][t] - samples["ref_log_probs"][i][t]
            expected = samples["token_level_scores"][i][t] - 0.3 * gap if m else 0.0
            assert samples["token_level_rewards"][i][t] == pytest.approx(expected, abs=1e-6)
    assert abs(run.rows[2]["actor/kl"]) > 1e-6
    assert run.rows[2]["actor/kl"] == run.rows[2]["actor/kl_in_reward"]
    assert run.rows[2]["actor/kl_coef"] == 0.3


def test_files_of_samples_have_each_tokens_entropy_and_change_nothing_of_what_is_learnt(lab: Lab) -> None:
    words = ("algorithm.use_kl_in_reward=true", "actor_rollout_ref.rollout.temperature=0.7")
    run, without = lab.run("entropy", *words), lab.run("no_entropy", *words, "trainer.samples_freq=-1")
    assert same_weights(run, without)
    samples = run.samples(1)
    model = AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.float64)
    written = []
    for tokens, mask, found in zip(
        samples["tokens"], samples["response_mask"], samples["entropy"], strict=True
    ):
        logits = model(torch.tensor([tokens])).logits[0, :-1].detach() / 0.7
        wanted = torch.distributions.Categorical(logits=logits).entropy()
        own = torch.tensor(mask[1:])
        torch.testing.assert_close(torch.tensor(found[1:])[own].double(), wanted[own], rtol=1e-5, atol=1e-5)
        written += wanted[own].tolist()
    assert run.rows[0]["actor/entropy"] == pytest.approx(sum(written) / len(written), abs=1e-5)


def test_the_gap_to_the_rollout_is_that_before_truncation_with_one_update_too(lab: Lab) -> None:
    run = lab.run("cut", "actor_rollout_ref.rollout.top_p=0.5", "actor_rollout_ref.rollout.top_k=10")
    assert all(row["rollout/log_prob_diff_max"] <= 1e-4 for row in run.rows)
    samples = run.samples(1)
    pairs = zip(samples["rollout_log_probs"], samples["rollout_log_probs_untruncated"], strict=True)
    assert any(abs(a - b) > 1e-3 for row, other in pairs for a, b in zip(row, other, strict=True))


def test_numbers_of_a_reward_stand_apart_from_the_runs_own(lab: Lab) -> None:
    (lab.folder / "many.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 0.0, 'max': 5.0, 'mean': 7.0}\n"
    )
    row = lab.run("many", f"custom_reward_function.path={lab.folder / 'many.py'}").rows[0]
    assert (row["reward/mean"], row["reward/max"]) == (0.0, 0.0)
    assert (row["reward/extra/mean"], row["reward/extra/max"]) == (7.0, 5.0)


def test_a_reward_model_takes_the_place_of_functions(lab: Lab) -> None:
    """The scores of the samples equal those that transformers computes."""
    config = AutoConfig.from_pretrained(lab.model, num_labels=1)
    torch.manual_seed(5)
    scorer = AutoModelForSequenceClassification.from_config(config)
    scorer.save_pretrained(lab.folder / "scorer")
    run = lab.run(
        "scored",
        "reward_model.enable=true",
        f"reward_model.model.path={lab.folder / 'scorer'}",
        "trainer.val_before_train=false",
        "trainer.test_freq=2",
        f"data.val_files={lab.val}",
    )
    samples = run.samples(1)
    with torch.no_grad():
        expected = [float(scorer(torch.tensor([row])).logits[0, 0]) for row in samples["tokens"]]
    assert samples["scores"] == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 0
    assert run.rows[0]["reward/mean"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert run.trainer.roles.reward is None
    assert run.rows[0]["timing/reward"] > 0
    assert "perf/busy_share/reward_model" in run.rows[0]
    assert "val/reward" in run.rows[1]


def test_the_schedule_counts_training_steps_whatever_the_mini_batches(lab: Lab) -> None:
    run = lab.run(
        "schedule",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
        "trainer.total_training_steps=6",
    )
    rates = [row["actor/lr"] for row in run.rows]
    assert rates == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005, 0.0025])


def test_a_run_skips_a_step_whose_gradient_is_not_finite(lab: Lab) -> None:
    """One of the two updates of the second step is bad; the metrics count it from then on."""
    (lab.folder / "spoilt.py").write_text(
        "from tandem.algorithms.advantages.grpo import grpo\n"
        "calls = []\n"
        "def spoilt(token_level_rewards, response_mask, offsets, group):\n"
        "    calls.append(1)\n"
        "    found = grpo(token_level_rewards, response_mask, offsets, group)\n"
        "    if len(calls) == 2:\n"
        "        found.advantages[response_mask.nonzero()[0]] = float('nan')\n"
        "    return found\n"
    )
    run = lab.run(
        "skips",
        f"algorithm.adv_estimator={lab.folder / 'spoilt.py'}:spoilt",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.skip_non_finite_steps=1",
        "trainer.total_training_steps=3",
    )
    assert [row["actor/skipped_steps"] for row in run.rows] == [0, 1, 1]
    assert all(isinstance(row["actor/loss"], float) for row in run.rows)
    (line,) = (
        line for line in (run.folder / "log" / "run.log").read_text().splitlines() if "skipped" in line
    )
    assert "actor update 2: the loss is not finite" in line and "actor_update_2_rank_0.pt" in line
    assert run.actor.actor.version == 5
