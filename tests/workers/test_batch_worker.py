import math

import numpy as np
import pytest
import torch

from tandem.config.actor import ActorConfig, PolicyLossConfig
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.errors import NonFiniteError, RewardError
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.workers.batch import BatchWorker, group_ids
from tandem.workers.reward import at_last_token


def worker_of(folder, estimator, actor=None, **more):
    return BatchWorker(AlgorithmConfig(adv_estimator=estimator, **more), RunFolder(folder / "run"), actor)


def test_groups_are_numbered_by_first_appearance():
    assert group_ids(np.array(["b", "b", "a", "b", "c"], dtype=object)).tolist() == [0, 0, 1, 0, 2]


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_one_column_of_fp64_makes_the_rest_fp64(tmp_path, estimator):
    """The numbers equal those in fp32 up to its precision, and GAE equals its recursion."""
    generator = torch.Generator().manual_seed(0)
    mask = Ragged.from_lengths(torch.ones(14, dtype=torch.bool), [4, 2, 3, 5])
    scores, logs, refs, values = (
        mask.with_values(sign * torch.rand(14, generator=generator, dtype=dtype))
        for sign, dtype in ((1, None), (-1, None), (-1, None), (1, torch.float64))
    )
    worker = worker_of(tmp_path, estimator, gamma=0.9, lam=0.8, use_kl_in_reward=True)
    names = ("response_mask", "token_level_scores", "old_log_probs", "ref_log_probs")
    columns = dict(zip(names, (mask, scores, logs, refs), strict=True))
    wide, narrow = (
        worker.compute_advantages(DataProto(columns | {"values": given}, {"uid": ["a", "a", "b", "b"]}), 0.5)
        for given in (values, values.with_values(values.values.float()))
    )
    for name in ("token_level_rewards", "advantages", "returns"):
        assert wide.ragged(name).values.dtype == torch.float64
        assert narrow.ragged(name).values.dtype == torch.float32
        assert torch.allclose(wide.ragged(name).values.float(), narrow.ragged(name).values, atol=1e-4)
    rewards_T = scores.values.double() - 0.5 * (logs.values - refs.values).double()
    assert torch.allclose(wide.ragged("token_level_rewards").values, rewards_T, atol=1e-7)
    if estimator == "gae":
        expected = []
        for rewards, value in zip(wide.ragged("token_level_rewards"), values, strict=True):
            gained, after, row = 0.0, 0.0, []
            for reward, now in zip(rewards.flip(0).tolist(), value.flip(0).tolist(), strict=True):
                gained, after = reward + 0.9 * after - now + 0.9 * 0.8 * gained, now
                row.append(gained + now)
            expected += row[::-1]
        assert wide.ragged("returns").values.tolist() == pytest.approx(expected, rel=0, abs=1e-12)


def vtrace_batch():
    """Return samples of 3, 2 and 4 tokens; the first is a prompt, where all columns but rewards are NaN."""
    mask = Ragged.from_lengths(torch.ones(9, dtype=torch.bool), torch.tensor([3, 2, 4]))
    mask.values[mask.offsets[:-1]] = False
    spoilt = torch.where(mask.values, 0.25, torch.nan)
    names = ("values", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    rewards = {"token_level_scores": mask.with_values(mask.values.float())}
    return {"response_mask": mask} | rewards | {name: mask.with_values(spoilt.clone()) for name in names}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("column", "error"),
    [
        *(("token_level_scores", RewardError), ("values", NonFiniteError), ("old_log_probs", NonFiniteError)),
        *(("rollout_log_probs", NonFiniteError), ("ref_log_probs", NonFiniteError)),
        ("reward_baselines", RewardError),
    ],
)
def test_what_is_not_finite_is_refused_where_it_counts(tmp_path, column, error, bad):
    by_sample = column == "reward_baselines"
    worker = worker_of(tmp_path, "remax" if by_sample else "vtrace", use_kl_in_reward=not by_sample)
    columns, uids = vtrace_batch() | {"reward_baselines": torch.ones(3)}, {"uid": ["a", "a", "b"]}
    worker.compute_advantages(DataProto(columns, uids), 0.5)  # NaN in prompts, and in what is not read
    if by_sample:
        columns[column][[1, 2]] = bad
    else:
        columns[column].values[[4, 7]] = bad  # the last token of sample 1, and one of sample 2
    with pytest.raises(error, match=f"{column}: .* are not finite") as caught:
        worker.compute_advantages(DataProto(columns, uids), 0.5)
    assert caught.value.got == "2 NaN or infinite, the first in sample 1"


def test_weights_of_the_components_come_from_the_config(tmp_path):
    worker = worker_of(tmp_path, "gdpo", gdpo_reward_weights=[1.0, 3.0])
    extras = [{"right": a, "short": b} for a, b in ((1.0, 0.0), (0.0, 1.0), (5.0, 5.0))]
    batch = DataProto(vtrace_batch(), {"uid": ["a", "a", "a"], "reward_extra": extras})
    got = worker.compute_advantages(batch, 0.0)
    first, second = (got.ragged("advantages").row(i)[-1] for i in (0, 1))
    assert first < second  # without the weights both would be equal


def test_the_estimator_reads_the_corrections_weights(tmp_path):
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="1.5")
    columns = vtrace_batch()
    columns["sum_pi_squared"] = columns["values"]
    columns["rollout_log_probs"].values[[2, 4, 7]] = torch.tensor([-0.5, 1.0, 0.75])
    worker = worker_of(tmp_path, "optimal_token_baseline", rollout_correction=correction)
    got = worker.compute_advantages(DataProto(columns, {"uid": ["a", "a", "a"]}), 0.0)
    weights = got.ragged("rollout_is_weights").values
    assert weights[[1, 2, 4, 7]].tolist() == pytest.approx([1.0, 1.5, math.exp(-0.75), math.exp(-0.5)])
    given = {name: values.values for name, values in columns.items()}
    given |= {"token_level_rewards": given["token_level_scores"], "rollout_is_weights": weights}
    given |= {"offsets": columns["response_mask"].offsets, "group": torch.zeros(3, dtype=torch.int64)}
    wanted = worker.spec(given).advantages
    assert torch.equal(got.ragged("advantages").values, wanted)
    plain = worker.spec(given | {"rollout_is_weights": torch.ones_like(weights)}).advantages
    assert not torch.equal(wanted, plain)


def test_tokens_are_chosen_among_those_that_were_not_rejected(tmp_path):
    correction = RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold="0.01")
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=1.0))
    columns = vtrace_batch()
    columns["rollout_log_probs"].values[2] = -1.0  # far from 0.25 in training
    worker = worker_of(tmp_path, "grpo", actor, rollout_correction=correction)
    got = worker.compute_advantages(DataProto(columns, {"uid": ["a", "a", "b"]}), 0.0)
    kept = got.ragged("kept_mask").values
    assert kept.tolist() == [False, True, False, False, True, False, True, True, True]
    assert torch.equal(got.ragged("selected_tokens").values, kept)


@pytest.mark.parametrize("seed", range(5))
def test_the_share_of_prompts_whose_responses_score_alike(tmp_path, seed):
    random = np.random.default_rng(seed)
    uids = random.integers(0, 12, size=30).astype(str).astype(object)  # some prompts have one response
    scores = random.integers(0, 3, size=30) / 3
    mask = Ragged.from_list([torch.tensor([False, True])] * 30)
    zeros = dict.fromkeys(("token_level_rewards", "advantages"), mask.with_values(torch.zeros(60)))
    columns = {"scores": torch.tensor(scores), "response_mask": mask} | zeros
    columns["tokens"] = mask.with_values(torch.zeros(60, dtype=torch.int64))
    arrays = {"uid": uids, "sample": np.arange(30), "finish_reason": ["stop"] * 30}
    arrays |= {"reward_extra": [{}] * 30, "data_source": ["sums"] * 30}
    batch = DataProto(columns, arrays)
    groups = [scores[uids == uid] for uid in set(uids)]
    alike = np.mean([float(group.std() == 0) for group in groups if len(group) > 1])
    for name, share in (("grpo", pytest.approx(alike, abs=1e-12)), ("reinforce_plus_plus", None)):
        found = worker_of(tmp_path, name).measure(batch).to_floats()
        assert found.get("reward/zero_std_share") == share


@pytest.fixture
def worker(tmp_path):
    return BatchWorker(AlgorithmConfig(adv_estimator="grpo"), RunFolder(tmp_path / "run"))


def scored(scores, extras=None):
    return DataProto({"scores": torch.tensor(scores)}, {"reward_extra": extras or [{} for _ in scores]})


METRICS = {"acc": [False, True], "score": [False, False], "seq_reward": [True, False]}
METRICS["reward"] = METRICS["seq_reward"]


@pytest.mark.parametrize("metric", METRICS)
def test_the_metric_is_the_rewards_own_number_or_the_score_before_the_punishment(worker, metric):
    """Responses to the first prompt differ in the score after the punishment, those to the second in acc."""
    extras = [{"acc": 1.0, "score": 1.0}] * 2 + [{"acc": 0.0, "score": 1.0}, {"acc": 1.0, "score": 1.0}]
    found = worker.group_spread(scored([0.5, 0.25, 1.0, 1.0], extras), 2, metric)
    assert found.differs.tolist() == METRICS[metric]
    assert found.reward == pytest.approx(2.75 / 4)
    without_acc = worker.group_spread(scored([0.0, 1.0, 1.0, 1.0]), 2, metric)
    assert without_acc.differs.tolist() == [True, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_and_not_filtered(worker, bad):
    with pytest.raises(RewardError, match="not finite") as caught:
        worker.group_spread(scored([1.0, 1.0, bad, bad]), 2, "acc")
    assert "2 samples, the first is number 2" in str(caught.value.got)


def test_the_punishment_is_at_the_last_response_token(worker):
    """Responses have 0, 2 and 4 tokens, and one reward is spread over its tokens."""
    mask = Ragged.from_list([[False], [False, True, True], [False, False, True, True, True, True]])
    rows = [[0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.25, 0.25, 0.0, 0.5]]
    columns = {"response_mask": mask, "token_level_scores": Ragged.from_list(rows, dtype=torch.float32)}
    columns |= {"scores": torch.tensor([0.0, 1.0, 1.0]), "reward_failed": torch.tensor([True, False, False])}
    arrays = {"reward_extra": [{}, {"acc": 1.0}, {}], "reward_why": [*"abc"]}
    batch = DataProto(columns, arrays | {"response_text": ["", "ab", "abcd"]})
    out = worker.punish_overlong(batch, 4, 3, 2.0, True)
    assert out.dense("reward_failed").tolist() == [True, False, False] and "response_mask" not in out
    assert list(out.non_tensor_batch["reward_why"]) == ["a", "b", "c"]
    taken = [0.0, -2 / 3, -2.0]
    assert out.dense("scores").tolist() == pytest.approx([0.0, 1 / 3, -1.0])
    rows[1][-1] += taken[1]
    rows[2][-1] += taken[2]
    for row, wanted in zip(out.ragged("token_level_scores"), rows, strict=True):
        assert row.tolist() == pytest.approx(wanted)
    extras = out.non_tensor_batch["reward_extra"].tolist()
    assert [(extra["score"], extra["overlong"]) for extra in extras] == [(0, 0), (1, 1), (1, 1)]
    assert [extra["overlong_reward"] for extra in extras] == pytest.approx(taken)
    assert extras[1]["acc"] == 1.0
    quiet = worker.punish_overlong(batch, 4, 3, 2.0, False).non_tensor_batch["reward_extra"]
    assert quiet.tolist() == [{"score": 0.0}, {"acc": 1.0, "score": 1.0}, {"score": 1.0}]
    assert "overlong" not in batch.non_tensor_batch["reward_extra"][0]


def test_cut_responses_are_those_that_ended_at_the_limit(worker):
    batch = DataProto(non_tensor_batch={"finish_reason": ["stop", "length", "abort", "length"]})
    assert np.array_equal(worker.left_out(batch, True), [False, True, False, True])


def test_a_failed_score_is_the_mean_of_its_group(worker):
    """Of three responses to the first prompt one failed, and of two to the second both failed."""
    mask = Ragged.from_list([[False] + [True] * length for length in (4, 3, 5, 2, 3)])
    scores, failed = torch.tensor([0.5, 9.0, -1.0, 2.0, 3.0]), torch.tensor([False, True, False, True, True])
    columns = {"scores": scores, "token_level_scores": at_last_token(scores, mask), "reward_failed": failed}
    found = worker.stand_in(DataProto({"response_mask": mask, **columns}, {"uid": [*"aaabb"]}))
    wanted = [0.5, -0.25, -1.0, 0.0, 0.0]
    assert found.dense("scores").tolist() == pytest.approx(wanted)
    assert [float(row.sum()) for row in found.ragged("token_level_scores")] == pytest.approx(wanted)


UIDS = ["a", "a", "a", "b", "b", "b", "c", "d", "d"]
FAILED = [False, True, False, True, False, True, False, True, True]
"""The first prompt has two samples left, the second one, the last none; the third has only one sample."""
BY_GROUP = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "maxrl", "gdpo", "grpo_passk")
BY_GROUP += ("reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline")


@pytest.mark.parametrize("name", [*BY_GROUP, "reinforce_plus_plus", "remax"])
def test_a_sample_that_failures_left_alone_teaches_nothing_where_samples_are_compared(tmp_path, name):
    generator, count = np.random.default_rng(3), len(UIDS)
    worker = BatchWorker(AlgorithmConfig(adv_estimator=name), RunFolder(tmp_path / "run"))
    mask = Ragged.from_list([[False] + [True] * int(n) for n in generator.integers(2, 6, count)])
    scores = torch.from_numpy(generator.uniform(0.1, 1.0, count)).float()

    def tokens(low, high):
        return mask.with_values(torch.from_numpy(generator.uniform(low, high, len(mask.values))).float())

    columns = {"response_mask": mask, "scores": scores, "token_level_scores": at_last_token(scores, mask)}
    columns |= {"reward_failed": torch.tensor(FAILED), "reward_baselines": torch.full((count,), 0.5)}
    columns |= {"old_log_probs": tokens(-2.0, -0.1), "sum_pi_squared": tokens(0.1, 0.5)}
    extras = [{} if failed else {"right": float(at)} for at, failed in enumerate(FAILED)]
    batch = DataProto(columns, {"uid": UIDS, "finish_reason": ["stop"] * count, "reward_extra": extras})
    batch = DataProto({**batch.batch, **worker.stand_in(batch).batch}, batch.non_tensor_batch)
    found = worker.compute_advantages(batch, 0.0).ragged("advantages")
    compares = name in BY_GROUP
    assert compares == ("group" in worker.spec.columns)
    taught = [0, 2, 6] if compares else [0, 2, 4, 6]
    out = worker.left_out(batch, False)
    assert np.flatnonzero(~out).tolist() == taught
    assert not found[np.flatnonzero(out)].values.any()
    alone = worker.compute_advantages(batch[taught], 0.0).ragged("advantages")
    assert torch.equal(found[taught].values, alone.values) and alone.values.any()


def test_a_batch_of_failures_alone_teaches_nothing(worker):
    mask = Ragged.from_list([[False, True], [False, True, True]])
    zeros = mask.with_values(torch.zeros(5))
    columns = {
        "response_mask": mask,
        "token_level_scores": zeros,
        "reward_failed": torch.tensor([True, True]),
    }
    batch = DataProto(columns, {"uid": ["a", "a"]})
    assert worker.compute_advantages(batch, 0.0).ragged("advantages").equal(zeros)


def test_failed_samples_do_not_make_a_prompt_differ(worker):
    extras = [{"right": 1.0}, {}, {"right": 1.0}, {"right": 0.0}, {}, {"right": 1.0}, {}, {}, {"right": 1.0}]
    batch = scored([0.0] * 9, extras)
    batch.batch["reward_failed"] = torch.tensor(["right" not in extra for extra in extras])
    assert worker.group_spread(batch, 3, "right").differs.tolist() == [False, True, False]
    batch.batch["reward_failed"] = torch.ones(9, dtype=torch.bool)
    assert worker.group_spread(batch, 3, "right").differs.tolist() == [False] * 3
