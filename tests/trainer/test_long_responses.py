"""Long responses: the length penalty in the reward, and truncated responses that no update uses.

In each loss aggregation, the denominators must count exactly the tokens that are used.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.runs import Finished, Lab, same_weights

OVERLONG = "reward_model.overlong_buffer"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MASK = "algorithm.mask_truncated_completions=true"
SHORT = f"{ROLLOUT}.stop=['1', '2', '3', '4', '5', 'a', 'e']"
"""Stop texts that end many responses before the limit of six tokens, so that all lengths occur."""


@pytest.fixture(scope="module", autouse=True)
def rewards(lab: Lab) -> None:
    for name, value in (("ones", "1.0"), ("spread", "len(set(solution_str)) / 6")):
        (lab.folder / f"{name}.py").write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            f"    return {value}\n"
        )


def reward(lab: Lab, name: str) -> str:
    return f"custom_reward_function.path={lab.folder / name}.py"


def lengths(run: Finished, step: int = 1) -> np.ndarray:
    return np.array([sum(mask) for mask in run.samples(step)["response_mask"]])


def cut(run: Finished, step: int = 1) -> np.ndarray:
    return np.array([reason == "length" for reason in run.samples(step)["finish_reason"]])


def test_the_punishment_is_in_training_rewards_and_not_in_validation(lab: Lab) -> None:
    run = lab.run(
        "punished", reward(lab, "ones"), SHORT, f"{ROLLOUT}.n=6", "trainer.total_training_steps=1",
        f"{OVERLONG}.enable=true", f"{OVERLONG}.len=3", f"{OVERLONG}.penalty_factor=0.5",
        f"{OVERLONG}.log=true", f"data.val_files={lab.val}", "trainer.test_freq=1",
    )  # fmt: skip
    samples, long = run.samples(1), lengths(run)
    taken = -0.5 * np.maximum(long - 3, 0) / 3
    assert {0.0, -0.5} < set(taken.tolist())
    assert samples["scores"] == pytest.approx(1 + taken)
    for row, mask, score in zip(
        samples["token_level_scores"], samples["response_mask"], samples["scores"], strict=True
    ):
        last = max(place for place, written in enumerate(mask) if written)
        assert row == [score if place == last else 0.0 for place in range(len(mask))]
    metrics = run.rows[-1]
    assert metrics["reward/mean"] == pytest.approx(1 + taken.mean())
    assert metrics["reward/extra/score"] == 1
    assert metrics["reward/extra/overlong_reward"] == pytest.approx(taken.mean())
    assert metrics["reward/extra/overlong"] == pytest.approx((taken < 0).mean())
    assert (metrics["val/reward"], metrics["val/accuracy"]) == (1, 1)


def test_prompts_are_filtered_by_the_score_before_the_punishment_or_after(lab: Lab) -> None:
    """All scores are equal; only the length penalty makes the responses of a prompt differ."""
    words = (
        reward(lab, "ones"), SHORT, f"{ROLLOUT}.n=6", "trainer.total_training_steps=1",
        f"{OVERLONG}.enable=true", f"{OVERLONG}.len=6", "algorithm.filter_groups.enable=true",
    )  # fmt: skip
    run = lab.run("by_length", *words, "algorithm.filter_groups.metric=seq_reward")
    assert len(set(run.samples(1)["uid"])) == 4
    for metric in ("acc", "score"):
        with pytest.raises(Exception, match="24 of 24 prompts had responses of the same"):
            lab.run(f"not_by_{metric}", *words, f"algorithm.filter_groups.metric={metric}")


def test_a_greedy_baseline_is_punished_as_the_samples_are(lab: Lab) -> None:
    """If the samples are greedy too, their rewards equal the baseline exactly."""
    run = lab.run(
        "baseline", reward(lab, "ones"), SHORT, "algorithm.adv_estimator=remax", f"{ROLLOUT}.top_k=1",
        "trainer.total_training_steps=1", f"{OVERLONG}.enable=true", f"{OVERLONG}.len=6",
    )  # fmt: skip
    assert max(run.samples(1)["scores"]) < 1
    assert run.rows[0]["critic/baseline/max"] == max(run.samples(1)["scores"])
    assert not any(advantage for row in run.samples(1)["advantages"] for advantage in row)


def policy_loss(run: Finished, mode: str) -> float:
    """Return the loss of one update at the policy that sampled, whose ratios are all one.

    The loss is minus the advantages of the responses that were not truncated, aggregated by `mode`.
    """
    samples = run.samples(1)
    kept = [
        [-float(a) for a, written in zip(advantages, mask, strict=True) if written]
        for advantages, mask, reason in zip(
            samples["advantages"], samples["response_mask"], samples["finish_reason"], strict=True
        )
        if reason != "length"
    ]
    total, sequences = sum(map(sum, kept)), len(kept)
    return {
        "token-mean": total / sum(map(len, kept)),
        "token-sum": total,
        "seq-mean-token-sum": total / sequences,
        "seq-mean-token-sum-norm": total / (sequences * 6),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in kept) / sequences,
    }[mode]


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"],
)
def test_denominators_count_only_what_is_learnt_from(lab: Lab, mode: str) -> None:
    """Micro-batches of two samples would have different denominators on their own."""
    run = lab.run(
        f"mask_{mode}", reward(lab, "spread"), SHORT, MASK, f"{ROLLOUT}.n=6",
        "trainer.total_training_steps=1", f"{ACTOR}.loss_agg_mode={mode}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    )  # fmt: skip
    assert 0 < cut(run).sum() < len(cut(run))
    assert run.rows[0]["actor/pg_loss"] == pytest.approx(policy_loss(run, mode), rel=1e-5, abs=1e-7)


def test_cut_responses_still_count_in_their_groups_baseline(lab: Lab) -> None:
    words = (reward(lab, "spread"), SHORT, f"{ROLLOUT}.n=6", "trainer.total_training_steps=1")
    masked, plain = (lab.run(f"baseline_{i}", *words, *more) for i, more in enumerate(((MASK,), ())))
    assert masked.samples(1)["advantages"] == plain.samples(1)["advantages"]
    assert masked.rows[0]["response_length/clip_ratio"] == cut(masked).mean()
    assert masked.rows[0]["actor/pg_loss"] != pytest.approx(plain.rows[0]["actor/pg_loss"], rel=1e-3)
    assert not same_weights(masked, plain)


def test_the_critic_does_not_learn_from_them_either(lab: Lab) -> None:
    run = lab.run(
        "critic_masked", "algorithm.adv_estimator=gae", reward(lab, "spread"), SHORT, MASK, f"{ROLLOUT}.n=4",
        "trainer.total_training_steps=1",
    )  # fmt: skip
    samples = run.samples(1)
    errors = [
        (value - target) ** 2 / 2
        for values, targets, mask, reason in zip(
            samples["values"], samples["returns"], samples["response_mask"], samples["finish_reason"],
            strict=True,
        )
        if reason != "length"
        for value, target, written in zip(values, targets, mask, strict=True)
        if written
    ]  # fmt: skip
    assert 0 < cut(run).sum() < len(cut(run))
    assert run.rows[0]["critic/loss"] == pytest.approx(np.mean(errors), rel=1e-4)


def test_a_mini_batch_of_cut_responses_alone_is_no_update(lab: Lab) -> None:
    """The stop text never occurs, so all responses are truncated."""
    words = (MASK, f"{ROLLOUT}.ignore_eos=true", f"{ROLLOUT}.stop=zzzzzzz", "trainer.total_training_steps=2")
    run = lab.run("all_cut", reward(lab, "spread"), *words)
    assert cut(run).all()
    assert run.actor.actor.version == 0
    assert [row["step"] for row in run.rows] == [1, 2]
    assert not any("actor/loss" in row for row in run.rows)


def test_mini_batches_hold_the_prompts_they_would_without(lab: Lab) -> None:
    """With mini-batches of one prompt and one response, each response that is not truncated is one update."""
    words = (reward(lab, "spread"), MASK, f"{ACTOR}.ppo_mini_batch_size=1", "trainer.total_training_steps=1")
    one = ("algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=1", SHORT)
    run = lab.run("one_each", *words, *one)
    learnt = {uid for uid, out in zip(run.samples(1)["uid"], cut(run), strict=True) if not out}
    assert 0 < len(learnt) < 4
    assert run.actor.actor.version == len(learnt)
