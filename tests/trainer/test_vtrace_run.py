"""V-trace in a run: a critic is created although no key asks for it, and old log-probs are computed."""

from __future__ import annotations

import math

import pytest

from tests.support.runs import Lab


@pytest.mark.equation("advantages/vtrace")
def test_its_targets_are_those_of_the_files_own_columns(lab: Lab) -> None:
    run = lab.run(
        "vtrace",
        "algorithm.adv_estimator=vtrace",
        "algorithm.gamma=0.9",
        "algorithm.adv_kwargs={rho_bar: 1.5, c_bar: 0.5}",
        "actor_rollout_ref.rollout.top_k=3",  # so that the samples do not come from exactly the policy
    )
    assert "critic/explained_variance" in run.rows[-1]
    samples, seen = run.samples(2), 0
    names = ("response_mask", "token_level_rewards", "values", "old_log_probs", "rollout_log_probs")
    for i, targets in enumerate(samples["returns"]):
        mask, rewards, values, old, rollout = (samples[name][i] for name in names)
        following = value = 0.0
        for t in reversed([t for t, inside in enumerate(mask) if inside]):
            weight = math.exp(old[t] - rollout[t])
            seen += weight < 0.99
            surprise = rewards[t] + 0.9 * value - values[t]
            advantage = min(1.5, weight) * (rewards[t] + 0.9 * following - values[t])
            target = values[t] + min(1.5, weight) * surprise + 0.9 * min(0.5, weight) * (following - value)
            assert targets[t] == pytest.approx(target, abs=1e-5)
            assert samples["advantages"][i][t] == pytest.approx(advantage, abs=1e-5)
            following, value = target, values[t]
    assert seen > 0
