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


def test_groups_are_numbered_by_first_appearance():
    assert group_ids(np.array(["b", "b", "a", "b", "c"], dtype=object)).tolist() == [0, 0, 1, 0, 2]


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_one_column_of_fp64_makes_the_rest_fp64(tmp_path, estimator):
    """The numbers equal those in fp32 up to its precision, and GAE equals its recursion."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 2, 3, 5])
    count = int(lengths.sum())
    mask = Ragged.from_lengths(torch.ones(count, dtype=torch.bool), lengths)
    scores = mask.with_values(torch.rand(count, generator=generator))
    logs = mask.with_values(-torch.rand(count, generator=generator))
    refs = mask.with_values(-torch.rand(count, generator=generator))
    values = mask.with_values(torch.rand(count, generator=generator, dtype=torch.float64))
    config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lam=0.8, use_kl_in_reward=True)
    worker = BatchWorker(config, RunFolder(tmp_path / "run"))
    columns = {
        "response_mask": mask,
        "token_level_scores": scores,
        "old_log_probs": logs,
        "ref_log_probs": refs,
    }
    uids = {"uid": ["a", "a", "b", "b"]}
    wide = worker.compute_advantages(DataProto(columns | {"values": values}, uids), 0.5)
    narrow = worker.compute_advantages(
        DataProto(columns | {"values": values.with_values(values.values.float())}, uids), 0.5
    )
    for name in ("token_level_rewards", "advantages", "returns"):
        assert wide.ragged(name).values.dtype == torch.float64
        assert narrow.ragged(name).values.dtype == torch.float32
        assert torch.allclose(wide.ragged(name).values.float(), narrow.ragged(name).values, atol=1e-4)
    rewards_T = scores.values.double() - 0.5 * (logs.values - refs.values).double()
    assert torch.allclose(wide.ragged("token_level_rewards").values, rewards_T, atol=1e-7)
    if estimator == "gae":
        raw = []
        for rewards, value in zip(wide.ragged("token_level_rewards"), values, strict=True):
            gained, row = 0.0, []
            for t in reversed(range(len(rewards))):
                after = float(value[t + 1]) if t + 1 < len(rewards) else 0.0
                gained = float(rewards[t]) + 0.9 * after - float(value[t]) + 0.9 * 0.8 * gained
                row.append(gained)
            raw += row[::-1]
        expected = torch.tensor(raw, dtype=torch.float64) + values.values
        assert torch.allclose(wide.ragged("returns").values, expected, atol=1e-12)


def vtrace_batch() -> dict[str, Ragged | torch.Tensor]:
    """Return three samples of 3, 2 and 4 tokens, the first token of each a prompt.

    All columns except the rewards are NaN at prompts.
    """
    lengths = torch.tensor([3, 2, 4])
    mask = Ragged.from_lengths(torch.ones(9, dtype=torch.bool), lengths)
    mask.values[mask.offsets[:-1]] = False
    spoilt = torch.where(mask.values, 0.25, torch.nan)
    names = ("values", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    rewards = {"token_level_scores": mask.with_values(mask.values.float())}
    return {"response_mask": mask} | rewards | {name: mask.with_values(spoilt.clone()) for name in names}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("column", "error", "hint"),
    [
        ("token_level_scores", RewardError, "let the reward return finite numbers"),
        ("values", NonFiniteError, "the critic has diverged"),
        ("old_log_probs", NonFiniteError, "the policy has diverged"),
        ("rollout_log_probs", NonFiniteError, "an engine that returns no log-probs"),
        ("ref_log_probs", NonFiniteError, "reference policy"),
    ],
)
def test_what_is_not_finite_is_refused_where_it_counts(tmp_path, column, error, hint, bad):
    config = AlgorithmConfig(adv_estimator="vtrace", use_kl_in_reward=True)
    worker = BatchWorker(config, RunFolder(tmp_path / "run"))
    uids = {"uid": ["a", "a", "b"]}
    columns = vtrace_batch()
    worker.compute_advantages(
        DataProto(columns, uids), 0.5
    )  # NaN in prompts and in columns that are not read
    columns[column].values[[4, 7]] = bad  # the last token of sample 1, and one of sample 2
    with pytest.raises(error, match=f"{column}: (rewards|numbers) are not finite") as caught:
        worker.compute_advantages(DataProto(columns, uids), 0.5)
    assert caught.value.got == "2 NaN or infinite, the first in sample 1"
    assert hint in (caught.value.remedy or "")


def test_rewards_by_sample_are_looked_at_too(tmp_path):
    worker = BatchWorker(AlgorithmConfig(adv_estimator="remax"), RunFolder(tmp_path / "run"))
    columns = vtrace_batch() | {"reward_baselines": torch.ones(3)}
    uids = {"uid": ["a", "a", "b"]}
    worker.compute_advantages(DataProto(columns, uids), 0.0)
    columns["reward_baselines"][2] = torch.nan
    with pytest.raises(RewardError, match="reward_baselines: rewards are not finite") as caught:
        worker.compute_advantages(DataProto(columns, uids), 0.0)
    assert str(caught.value.got).endswith("the first in sample 2")


def test_weights_of_the_components_come_from_the_config(tmp_path):
    config = AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_weights=[1.0, 3.0])
    worker = BatchWorker(config, RunFolder(tmp_path / "run"))
    extras = [{"right": a, "short": b} for a, b in ((1.0, 0.0), (0.0, 1.0), (5.0, 5.0))]
    batch = DataProto(vtrace_batch(), {"uid": ["a", "a", "a"], "reward_extra": extras})
    got = worker.compute_advantages(batch, 0.0)
    first, second = (got.ragged("advantages").row(i)[-1] for i in (0, 1))
    assert first < second  # without the weights both would be equal


def test_the_estimator_reads_the_corrections_weights(tmp_path):
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="1.5")
    config = AlgorithmConfig(adv_estimator="optimal_token_baseline", rollout_correction=correction)
    columns = vtrace_batch()
    columns["sum_pi_squared"] = columns["values"]
    columns["rollout_log_probs"].values[[2, 4, 7]] = torch.tensor([-0.5, 1.0, 0.75])
    worker = BatchWorker(config, RunFolder(tmp_path / "run"))
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
    config = AlgorithmConfig(adv_estimator="grpo", rollout_correction=correction)
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=1.0))
    columns = vtrace_batch()
    columns["rollout_log_probs"].values[2] = -1.0  # far from 0.25 in training
    worker = BatchWorker(config, RunFolder(tmp_path / "run"), actor)
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
    batch = DataProto(
        {
            "scores": torch.tensor(scores),
            "response_mask": mask,
            "tokens": mask.with_values(torch.zeros(60, dtype=torch.int64)),
            "token_level_rewards": mask.with_values(torch.zeros(60)),
            "advantages": mask.with_values(torch.zeros(60)),
        },
        {
            "uid": uids,
            "sample": np.arange(30),
            "finish_reason": np.array(["stop"] * 30, dtype=object),
            "reward_extra": np.array([{}] * 30, dtype=object),
            "data_source": np.array(["sums"] * 30, dtype=object),
        },
    )
    groups = [scores[uids == uid] for uid in set(uids)]
    alike = [float(group.std() == 0) for group in groups if len(group) > 1]
    grpo = BatchWorker(AlgorithmConfig(adv_estimator="grpo"), RunFolder(tmp_path))
    found = grpo.measure(batch).to_floats()
    assert found["reward/zero_std_share"] == pytest.approx(np.mean(alike), abs=1e-12)
    over_batch = BatchWorker(AlgorithmConfig(adv_estimator="reinforce_plus_plus"), RunFolder(tmp_path))
    assert "reward/zero_std_share" not in over_batch.measure(batch).to_floats()
