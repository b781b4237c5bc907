"""The rollout correction in whole runs.

An exact engine needs no correction. An engine that returns log-probs with a known error is corrected by
amounts that can be computed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.algorithms.registry import advantage_estimator
from tandem.config.load import load_train_config
from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.errors import ConfigError, EngineError
from tandem.trainer.steps import plan_run
from tandem.workers.correction import Correction
from tests.support.runs import Finished, Lab

C = "algorithm.rollout_correction"
TWO_UPDATES = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
ONE_STEP = "trainer.total_training_steps=1"
OWN = """
import torch

from tandem.workers.actor import ActorWorker
from tandem.workers.rollout_part import RolloutPart


class ShiftedRollout(RolloutPart):
    \"\"\"Its rollout says that each token was more probable by 0.5 sin(token) nats than it was.\"\"\"

    def batch(self, *args, **kwargs):
        batch = super().batch(*args, **kwargs)
        logs, tokens = batch.ragged("rollout_log_probs"), batch.ragged("tokens").values
        shift = 0.5 * torch.sin(tokens.double())
        shifted = torch.where(batch.ragged("response_mask").values, logs.values + shift, 0)
        batch.batch["rollout_log_probs"] = logs.with_values(shifted.to(logs.values.dtype))
        return batch


class Shifted(ActorWorker):
    rollout_part = ShiftedRollout


class SilentRollout(RolloutPart):
    def batch(self, *args, **kwargs):
        batch = super().batch(*args, **kwargs)
        logs = batch.ragged("rollout_log_probs")
        batch.batch["rollout_log_probs"] = logs.with_values(torch.full_like(logs.values, torch.nan))
        return batch


class Silent(ActorWorker):
    rollout_part = SilentRollout


def half(old_log_probs, rollout_log_probs, *, share=0.5):
    return (share * (old_log_probs - rollout_log_probs)).exp()


def far(old_log_probs, rollout_log_probs, response_mask, offsets):
    return (old_log_probs - rollout_log_probs).abs()


def wrong(old_log_prob, advantages): ...
"""


@pytest.fixture(autouse=True, scope="module")
def files(lab: Lab) -> None:
    """Write custom workers and functions, and a reward that differs between samples."""
    (lab.folder / "own.py").write_text(OWN)
    (lab.folder / "length.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(set(solution_str)) / 6\n"
    )


def run(lab: Lab, name: str, *words: str, worker: str | None = None) -> Finished:
    own = (
        []
        if worker is None
        else [f"trainer.worker_classes={{actor_rollout: '{lab.folder}/own.py:{worker}'}}"]
    )
    return lab.run(name, f"custom_reward_function.path={lab.folder / 'length.py'}", *own, *words)


def tokens(samples: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the response tokens with their columns; `gap` is the error of the rollout's log-prob."""
    for i, mask in enumerate(samples["response_mask"]):
        for t, written in enumerate(mask):
            if written:
                row = {
                    name: column[i][t]
                    for name, column in samples.items()
                    if isinstance(column[i], list) and len(column[i]) == len(mask)
                }
                yield row | {"sample": i, "gap": 0.5 * math.sin(row["tokens"])}


def test_an_exact_engine_has_weights_of_one_and_loses_nothing(lab: Lab) -> None:
    words = (f"{C}.rollout_is=token", f"{C}.rollout_rs=token_k1,seq_max_k2", f"{C}.rollout_rs_threshold=1.01")
    made = run(lab, "exact", *words, TWO_UPDATES)
    plain = run(lab, "plain", TWO_UPDATES)
    for row in made.rows:
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
        assert row["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-6)
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 0
        assert "timing/old_log_prob" in row
    for token in tokens(made.samples(2)):
        assert token["rollout_is_weights"] == pytest.approx(1, abs=1e-4)
        assert token["kept_mask"]
    first, second = made.rows[0], plain.rows[0]
    assert first["actor/grad_norm"] == pytest.approx(second["actor/grad_norm"], rel=1e-3)


@pytest.mark.equation("corrections/token", "rejections/token_k1")
def test_a_shifted_engine_is_corrected_as_by_hand_before_the_updates(lab: Lab) -> None:
    made = run(
        lab, "shifted", f"{C}.rollout_is=token", f"{C}.rollout_is_threshold=1.3", f"{C}.rollout_rs=token_k1",
        f"{C}.rollout_rs_threshold=0.7_1.5", TWO_UPDATES, ONE_STEP, worker="Shifted",
    )  # fmt: skip
    rows = list(tokens(made.samples(1)))
    kept = [0.7 <= math.exp(row["gap"]) <= 1.5 for row in rows]
    weights = [min(math.exp(-row["gap"]), 1.3) for row in rows]
    assert 0 < sum(kept) < len(kept)
    assert [row["kept_mask"] for row in rows] == kept
    assert [row["rollout_is_weights"] for row in rows] == pytest.approx(weights, rel=1e-4)
    measured = made.rows[0]
    assert measured["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - sum(kept) / len(kept))
    assert measured["rollout_corr/rollout_is_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-4)
    assert measured["rollout_corr/kl"] == pytest.approx(sum(r["gap"] for r in rows) / len(rows), abs=1e-4)


@pytest.mark.equation("corrections/token", "rejections/seq_mean_k1")
def test_with_one_update_the_loss_is_that_by_hand_without_a_forward_for_old_log_probs(lab: Lab) -> None:
    made = run(
        lab, "one", f"{C}.rollout_is=token", f"{C}.rollout_rs=seq_mean_k1", f"{C}.rollout_rs_threshold=1.15",
        ONE_STEP, worker="Shifted",
    )  # fmt: skip
    rows = list(tokens(made.samples(1)))
    means = {}
    for i in {row["sample"] for row in rows}:
        own = [row["gap"] for row in rows if row["sample"] == i]
        means[i] = sum(own) / len(own)
    kept = [row for row in rows if abs(means[row["sample"]]) <= math.log(1.15)]
    assert 0 < len(kept) < len(rows)
    loss = -sum(min(math.exp(-row["gap"]), 2.0) * row["advantages"] for row in kept) / len(kept)
    measured = made.rows[0]
    assert measured["actor/loss"] == pytest.approx(loss, abs=1e-4)
    assert measured["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - len(kept) / len(rows))
    assert "timing/old_log_prob" not in measured
    assert "old_log_probs" not in rows[0]


@pytest.mark.equation("policy_losses/bypass_mode")
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode_compares_with_the_rollout_and_saves_the_forward(lab: Lab, loss_type: str) -> None:
    extra = [f"{C}.loss_type=reinforce", f"{C}.rollout_is=token"] if loss_type == "reinforce" else []
    made = run(lab, f"bypass_{loss_type}", f"{C}.bypass_mode=true", *extra, ONE_STEP, worker="Shifted")
    rows = list(tokens(made.samples(1)))
    losses = []
    for row in rows:
        ratio, advantage = math.exp(-row["gap"]), row["advantages"]
        if loss_type == "reinforce":
            log_prob = row["rollout_log_probs"] - row["gap"]
            losses.append(-advantage * log_prob * min(ratio, 2.0))
        else:
            losses.append(max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)))
        assert row["old_log_probs"] == row["rollout_log_probs"]
    assert made.rows[0]["actor/loss"] == pytest.approx(sum(losses) / len(losses), abs=2e-4)
    assert "timing/old_log_prob" not in made.rows[0]


def test_a_clipped_ratio_to_the_rollout_takes_no_weight_beside_it() -> None:
    """A verl command line may ask for both; the weight is ignored, and a message says so."""
    for loss_type, weighs in (("ppo_clip", False), ("reinforce", True)):
        config = RolloutCorrectionConfig(bypass_mode=True, loss_type=loss_type, rollout_is="token")
        assert (Correction(config).weight is not None) == weighs
        assert config.corrects == weighs


def test_in_bypass_mode_the_first_update_alone_tells_of_the_engine(lab: Lab) -> None:
    """Later updates compare with a policy that has moved, which is no fault of the rollout."""
    made = run(lab, "bypass_exact", f"{C}.bypass_mode=true", TWO_UPDATES)
    for row in made.rows:
        assert row["rollout/log_prob_diff_max"] <= 1e-4
        assert row["rollout_corr/log_ppl_abs_diff"] > 1e-3  # over both updates
        assert "timing/old_log_prob" not in row
    assert made.trainer.session.watch.named == {}


def test_where_all_is_rejected_nothing_is_learnt_and_the_run_goes_on(lab: Lab) -> None:
    words = (f"{C}.rollout_rs=token_k2", f"{C}.rollout_rs_threshold=1e-9")
    for name, more in (("none_one", ()), ("none_two", (TWO_UPDATES,))):
        made = run(lab, name, *words, *more, worker="Shifted")
        assert len(made.rows) == 2 and made.actor.actor.version == 0
        assert all(row["rollout_corr/rollout_rs_masked_fraction"] == 1 for row in made.rows)
        log = (made.folder / "log" / "run.log").read_text()
        assert log.count("actor update 0: every token was rejected") >= 2


def test_a_critic_does_not_learn_from_what_was_rejected(lab: Lab) -> None:
    words = (f"{C}.rollout_rs=token_k1", f"{C}.rollout_rs_threshold=0.7_1.5", "algorithm.adv_estimator=gae")
    made = run(lab, "critic", *words, ONE_STEP, "critic.optim.lr=0", worker="Shifted")
    rows = list(tokens(made.samples(1)))
    kept = [row for row in rows if row["kept_mask"]]
    assert 0 < len(kept) < len(rows)
    loss = sum((row["values"] - row["returns"]) ** 2 for row in kept) / (2 * len(kept))
    assert made.rows[0]["critic/loss"] == pytest.approx(loss, rel=1e-4)


def test_a_users_own_weight_and_rejection(lab: Lab) -> None:
    own = f"{lab.folder}/own.py"
    made = run(
        lab, "own", f"{C}.rollout_is={own}:half", f"{C}.rollout_rs={own}:far",
        f"{C}.rollout_rs_threshold=0.3", TWO_UPDATES, ONE_STEP, worker="Shifted",
    )  # fmt: skip
    for row in tokens(made.samples(1)):
        assert row["rollout_is_weights"] == pytest.approx(math.exp(-row["gap"] / 2), rel=1e-4)
        assert row["kept_mask"] == (abs(row["gap"]) <= 0.3)
    assert "rollout_corr/rollout_rs_far_mean" in made.rows[0]
    with pytest.raises(ConfigError) as caught:
        run(lab, "wrong", f"{C}.rollout_is={own}:wrong")
    assert "did you mean 'old_log_probs'?" in str(caught.value)
    assert "-> weights per token, >= 0" in str(caught.value)


def test_an_engine_without_log_probs_is_refused(lab: Lab) -> None:
    for name, word in (("silent", f"{C}.rollout_is=token"), ("silent_bypass", f"{C}.bypass_mode=true")):
        with pytest.raises(EngineError) as caught:
            run(lab, name, word, worker="Silent")
        assert "not finite" in str(caught.value) and "the first in sample 0" in str(caught.value)
        assert "rollout.name=native" in str(caught.value)


@pytest.mark.parametrize(
    ("estimator", "words", "recomputes"),
    [
        ("grpo", ["rollout_is=token"], False),
        ("grpo", ["rollout_is=token", "rollout_rs=token_k2", "rollout_rs_threshold=0.1"], False),
        ("gae", ["rollout_is=token"], False),
        ("gae", ["rollout_rs=token_k2", "rollout_rs_threshold=0.1"], True),
        ("grpo", ["rollout_is=token", "rollout_is_batch_normalize=true"], True),
        ("gae", ["bypass_mode=true", "rollout_rs=token_k2", "rollout_rs_threshold=0.1"], False),
    ],
)
def test_old_log_probs_are_recomputed_only_where_they_must_be(
    lab: Lab, estimator: str, words: list[str], recomputes: bool
) -> None:
    settings = [*lab.overrides(lab.folder / "unused"), f"algorithm.adv_estimator={estimator}"]
    config = load_train_config(None, [*settings, *(f"{C}.{word}" for word in words)]).config
    assert plan_run(config, advantage_estimator(estimator), 1).recompute_old is recomputes


def test_bypass_mode_is_refused_where_its_forward_is_needed(lab: Lab) -> None:
    words = ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full", f"{C}.bypass_mode=true"]
    config = load_train_config(None, [*lab.overrides(lab.folder / "unused"), *words]).config
    with pytest.raises(ConfigError, match="ref_kl to compute") as caught:
        plan_run(config, advantage_estimator(config.algorithm.adv_estimator), 1)
    assert caught.value.field == f"{C}.bypass_mode"


def test_normalised_weights_have_mean_one(lab: Lab) -> None:
    words = (f"{C}.rollout_is=token", f"{C}.rollout_is_batch_normalize=true")
    made = run(lab, "normalised", *words, ONE_STEP, worker="Shifted")
    weights = torch.tensor([row["rollout_is_weights"] for row in tokens(made.samples(1))])
    raw = torch.tensor([min(math.exp(-row["gap"]), 2.0) for row in tokens(made.samples(1))])
    assert float(weights.mean()) == pytest.approx(1, abs=1e-5)
    assert torch.allclose(weights, raw / raw.mean(), atol=1e-4)
    factor = made.rows[0]["rollout_corr/rollout_is_batch_norm_factor"]
    assert factor == pytest.approx(float(raw.mean()), rel=1e-4)
