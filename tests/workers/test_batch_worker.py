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
    alike = [float(group.std() == 0) for group in groups if len(group) > 1]
    found = worker_of(tmp_path, "grpo").measure(batch).to_floats()
    assert found["reward/zero_std_share"] == pytest.approx(np.mean(alike), abs=1e-12)
    over_batch = worker_of(tmp_path, "reinforce_plus_plus").measure(batch).to_floats()
    assert "reward/zero_std_share" not in over_batch
