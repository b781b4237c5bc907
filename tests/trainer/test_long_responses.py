import numpy as np
import pytest

from tests.support.runs import same_weights

MASK = "algorithm.mask_truncated_completions=true"
SHORT = "R.stop=['1', '2', '3', '4', '5', 'a', 'e'] R.n=6 steps=1"
"""Stop texts that end many responses before the limit of six tokens, so that all lengths occur."""


def cut(run):
    return np.array([reason == "length" for reason in run.samples(1)["finish_reason"]])


def test_the_punishment_is_in_training_rewards_and_not_in_validation(lab):
    buffer = "reward_model.overlong_buffer={enable: true, len: 3, penalty_factor: 0.5, log: true}"
    run = lab.run("punished", lab.reward("1.0"), SHORT, buffer, lab.validated, "trainer.test_freq=1")
    samples, metrics = run.samples(1), run.rows[-1]
    taken = -0.5 * np.maximum(np.array([sum(mask) for mask in samples["response_mask"]]) - 3, 0) / 3
    assert {0.0, -0.5} < set(taken.tolist())
    assert samples["scores"] == pytest.approx(1 + taken)
    for row, mask, score in run.each(1, "token_level_scores", "response_mask", "scores"):
        last = max(np.flatnonzero(mask))
        assert row == [score if place == last else 0.0 for place in range(len(mask))]
    wanted = {"mean": 1 + taken.mean(), "extra/score": 1, "extra/overlong_reward": taken.mean()}
    for name, value in {**wanted, "extra/overlong": (taken < 0).mean()}.items():
        assert metrics[f"reward/{name}"] == pytest.approx(value), name
    assert (metrics["val/reward"], metrics["val/accuracy"]) == (1, 1)


def test_prompts_are_filtered_by_the_score_before_the_punishment_or_after(lab):
    words = (lab.reward("1.0"), SHORT, "reward_model.overlong_buffer={enable: true, len: 6} F.enable=true")
    run = lab.run("by_length", *words, "F.metric=seq_reward")
    assert len(set(run.samples(1)["uid"])) == 4
    for metric in ("acc", "score"):
        with pytest.raises(Exception, match="24 of 24 prompts had responses of the same"):
            lab.run(f"not_by_{metric}", *words, f"F.metric={metric}")


def test_a_greedy_baseline_is_punished_as_the_samples_are(lab):
    """If the samples are greedy too, their rewards equal the baseline exactly."""
    words = "algorithm.adv_estimator=remax R.top_k=1 reward_model.overlong_buffer={enable: true, len: 6}"
    run = lab.run("baseline", lab.reward("1.0"), f"{SHORT} R.n=3", words)
    assert max(run.samples(1)["scores"]) < 1
    assert run.rows[0]["critic/baseline/max"] == max(run.samples(1)["scores"])
    assert not any(advantage for row in run.samples(1)["advantages"] for advantage in row)


@pytest.mark.parametrize(
    "mode",
    ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"],
)
def test_denominators_count_only_what_is_learnt_from(lab, mode):
    """All ratios are one, so the loss is minus the advantages; micro-batches of two differ."""
    words = f"A.loss_agg_mode={mode} A.ppo_micro_batch_size_per_gpu=2"
    run = lab.run(f"mask_{mode}", lab.letters, SHORT, MASK, words)
    assert 0 < cut(run).sum() < len(cut(run))
    kept: dict[int, list[float]] = {}
    for token in run.tokens(1):
        if token["finish_reason"] != "length":
            kept.setdefault(token["sample"], []).append(-token["advantages"])
    total, sequences = sum(map(sum, kept.values())), len(kept)
    wanted = {
        "token-mean": total / sum(map(len, kept.values())),
        "token-sum": total,
        "seq-mean-token-sum": total / sequences,
        "seq-mean-token-sum-norm": total / (sequences * 6),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in kept.values()) / sequences,
    }[mode]
    assert run.rows[0]["actor/pg_loss"] == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_cut_responses_still_count_in_their_groups_baseline(lab):
    masked, plain = (lab.run(f"in_group_{word}", lab.letters, SHORT, word) for word in (MASK, ""))
    assert masked.samples(1)["advantages"] == plain.samples(1)["advantages"]
    assert masked.rows[0]["response_length/clip_ratio"] == cut(masked).mean()
    assert masked.rows[0]["actor/pg_loss"] != pytest.approx(plain.rows[0]["actor/pg_loss"], rel=1e-3)
    assert not same_weights(masked, plain)


def test_the_critic_does_not_learn_from_them_either(lab):
    run = lab.run("critic_masked", "GAE", lab.letters, f"{SHORT} R.n=4", MASK)
    learnt = [token for token in run.tokens(1) if token["finish_reason"] != "length"]
    assert 0 < cut(run).sum() < len(cut(run))
    wanted = np.mean([(token["values"] - token["returns"]) ** 2 / 2 for token in learnt])
    assert run.rows[0]["critic/loss"] == pytest.approx(wanted, rel=1e-4)


def test_a_mini_batch_of_cut_responses_alone_is_no_update(lab):
    run = lab.run("all_cut", lab.letters, MASK, "R.ignore_eos=true R.stop=zzzzzzz")
    assert cut(run).all()
    assert run.actor.actor.version == 0
    assert [row["step"] for row in run.rows] == [1, 2]
    assert not any("actor/loss" in row for row in run.rows)


def test_mini_batches_hold_the_prompts_they_would_without(lab):
    """With mini-batches of one prompt and one response, each response that is not truncated is one update."""
    words = "A.ppo_mini_batch_size=1 algorithm.adv_estimator=reinforce_plus_plus"
    run = lab.run("one_each", lab.letters, MASK, words, f"{SHORT} R.n=1")
    learnt = {uid for uid, out in zip(run.samples(1)["uid"], cut(run), strict=True) if not out}
    assert 0 < len(learnt) < 4
    assert run.actor.actor.version == len(learnt)
