import numpy as np
import pytest
import torch

from tandem.config.algorithm import AlgorithmConfig
from tandem.errors import RewardError
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto, Ragged
from tandem.workers.batch import BatchWorker
from tandem.workers.reward import at_last_token


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
    arrays = {
        "reward_extra": [{}, {"acc": 1.0}, {}],
        "reward_why": [*"abc"],
        "response_text": ["", "ab", "abcd"],
    }
    batch = DataProto(columns, arrays)
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
    batch = DataProto(
        {"response_mask": mask, "token_level_scores": zeros, "reward_failed": torch.tensor([True, True])},
        {"uid": ["a", "a"]},
    )
    assert worker.compute_advantages(batch, 0.0).ragged("advantages").equal(zeros)


def test_failed_samples_do_not_make_a_prompt_differ(worker):
    """The metric is a number of the reward that failed samples do not have."""
    extras = [{"right": 1.0}, {}, {"right": 1.0}, {"right": 0.0}, {}, {"right": 1.0}, {}, {}, {"right": 1.0}]
    batch = scored([0.0] * 9, extras)
    batch.batch["reward_failed"] = torch.tensor(["right" not in extra for extra in extras])
    assert worker.group_spread(batch, 3, "right").differs.tolist() == [False, True, False]
    batch.batch["reward_failed"] = torch.ones(9, dtype=torch.bool)
    assert worker.group_spread(batch, 3, "right").differs.tolist() == [False] * 3
