import math

import numpy as np
import pytest

from tandem.algorithms.registry import advantage_estimator
from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.errors import ConfigError, EngineError
from tandem.trainer.steps import plan_run
from tandem.workers.correction import Correction
from tests.support.words import rows

TWO_UPDATES = "A.ppo_mini_batch_size=2"
OWN = """
import torch

from tandem.workers.actor import ActorWorker
from tandem.workers.rollout_part import RolloutPart

class ShiftedRollout(RolloutPart):
    def batch(self, *args, **kwargs):
        batch = super().batch(*args, **kwargs)
        logs, tokens = batch.ragged("rollout_log_probs"), batch.ragged("tokens").values
        shift = 0.5 * torch.sin(tokens.double())
        shifted = torch.where(batch.ragged("response_mask").values, logs.values + shift, 0)
        batch.batch["rollout_log_probs"] = logs.with_values(shifted.to(logs.values.dtype))
        return batch

class Shifted(ActorWorker):
    rollout_part = ShiftedRollout

class SilentRollout(ShiftedRollout):
    def batch(self, *args, **kwargs):
        batch = super().batch(*args, **kwargs)
        batch.ragged("rollout_log_probs").values.fill_(torch.nan)
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
def own(lab):
    (lab.folder / "own.py").write_text(OWN)
    return f"{lab.folder}/own.py"


def run(lab, name, *words, worker=None):
    own = [f"W.actor_rollout={lab.folder}/own.py:{worker}"] if worker else []
    return lab.run(name, lab.letters, *own, *words)


def tokens(made, step=1):
    """Return the response tokens; `gap` is the error of the rollout's log-prob."""
    return [row | {"gap": 0.5 * math.sin(row["tokens"])} for row in made.tokens(step)]


def test_an_exact_engine_has_weights_of_one_and_loses_nothing(lab):
    words = "C.rollout_is=token C.rollout_rs=token_k1,seq_max_k2 C.rollout_rs_threshold=1.01"
    made, plain = run(lab, "exact", words, TWO_UPDATES), run(lab, "plain", TWO_UPDATES)
    for row in made.rows:
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
        assert row["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-6)
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 0 and "timing/old_log_prob" in row
    for token in tokens(made, 2):
        assert token["kept_mask"] and token["rollout_is_weights"] == pytest.approx(1, abs=1e-4)
    assert made.rows[0]["actor/grad_norm"] == pytest.approx(plain.rows[0]["actor/grad_norm"], rel=1e-3)


@pytest.mark.equation("corrections/token", "rejections/token_k1")
def test_a_shifted_engine_is_corrected_as_by_hand_before_the_updates(lab):
    words = "C.rollout_is=token C.rollout_is_threshold=1.3 C.rollout_rs=token_k1 steps=1"
    made = run(lab, "shifted", words, "C.rollout_rs_threshold=0.7_1.5", TWO_UPDATES, worker="Shifted")
    found, measured = tokens(made), made.rows[0]
    kept = [0.7 <= math.exp(row["gap"]) <= 1.5 for row in found]
    weights = [min(math.exp(-row["gap"]), 1.3) for row in found]
    assert 0 < sum(kept) < len(kept)
    assert [row["kept_mask"] for row in found] == kept
    assert [row["rollout_is_weights"] for row in found] == pytest.approx(weights, rel=1e-4)
    assert measured["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - np.mean(kept))
    assert measured["rollout_corr/rollout_is_mean"] == pytest.approx(np.mean(weights), rel=1e-4)
    assert measured["rollout_corr/kl"] == pytest.approx(np.mean([row["gap"] for row in found]), abs=1e-4)


@pytest.mark.equation("corrections/token", "rejections/seq_mean_k1")
def test_with_one_update_the_loss_is_that_by_hand_without_a_forward_for_old_log_probs(lab):
    words = "C.rollout_is=token C.rollout_rs=seq_mean_k1 C.rollout_rs_threshold=1.15 steps=1"
    made = run(lab, "one", words, worker="Shifted")
    found, measured = tokens(made), made.rows[0]
    gaps = {i: np.mean([row["gap"] for row in found if row["sample"] == i]) for i in range(12)}
    kept = [row for row in found if abs(gaps[row["sample"]]) <= math.log(1.15)]
    assert 0 < len(kept) < len(found)
    loss = -sum(min(math.exp(-row["gap"]), 2.0) * row["advantages"] for row in kept) / len(kept)
    assert measured["actor/loss"] == pytest.approx(loss, abs=1e-4)
    assert measured["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - len(kept) / len(found))
    assert "timing/old_log_prob" not in measured and "old_log_probs" not in found[0]


@pytest.mark.equation("policy_losses/bypass_mode")
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode_compares_with_the_rollout_and_saves_the_forward(lab, loss_type):
    extra = "C.loss_type=reinforce C.rollout_is=token" if loss_type == "reinforce" else ""
    made = run(lab, f"bypass_{loss_type}", f"C.bypass_mode=true {extra} steps=1", worker="Shifted")
    losses = []
    for row in tokens(made):
        ratio, advantage = math.exp(-row["gap"]), row["advantages"]
        clipped = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
        score = -advantage * (row["rollout_log_probs"] - row["gap"]) * min(ratio, 2.0)
        losses.append(score if loss_type == "reinforce" else clipped)
        assert row["old_log_probs"] == row["rollout_log_probs"]
    assert made.rows[0]["actor/loss"] == pytest.approx(np.mean(losses), abs=2e-4)
    assert "timing/old_log_prob" not in made.rows[0]


def test_a_clipped_ratio_to_the_rollout_takes_no_weight_beside_it():
    for loss_type, weighs in (("ppo_clip", False), ("reinforce", True)):
        config = RolloutCorrectionConfig(bypass_mode=True, loss_type=loss_type, rollout_is="token")
        assert (Correction(config).weight is not None) == weighs == config.corrects


def test_in_bypass_mode_the_first_update_alone_tells_of_the_engine(lab):
    made = run(lab, "bypass_exact", "C.bypass_mode=true", TWO_UPDATES)
    for row in made.rows:
        assert row["rollout/log_prob_diff_max"] <= 1e-4
        assert row["rollout_corr/log_ppl_abs_diff"] > 1e-3  # over both updates
        assert "timing/old_log_prob" not in row
    assert made.trainer.session.watch.named == {}


def test_where_all_is_rejected_nothing_is_learnt_and_the_run_goes_on(lab):
    for name, more in (("none_one", ""), ("none_two", TWO_UPDATES)):
        words = f"C.rollout_rs=token_k2 C.rollout_rs_threshold=1e-9 {more}"
        made = run(lab, name, words, worker="Shifted")
        assert len(made.rows) == 2 and made.actor.actor.version == 0
        assert all(row["rollout_corr/rollout_rs_masked_fraction"] == 1 for row in made.rows)
        assert made.log.count("actor update 0: every token was rejected") >= 2


def test_a_critic_does_not_learn_from_what_was_rejected(lab):
    words = "C.rollout_rs=token_k1 C.rollout_rs_threshold=0.7_1.5 GAE steps=1 critic.optim.lr=0"
    made = run(lab, "critic", words, worker="Shifted")
    kept = [row for row in tokens(made) if row["kept_mask"]]
    assert 0 < len(kept) < len(tokens(made))
    loss = sum((row["values"] - row["returns"]) ** 2 for row in kept) / (2 * len(kept))
    assert made.rows[0]["critic/loss"] == pytest.approx(loss, rel=1e-4)


def test_a_users_own_weight_and_rejection(lab, own):
    words = f"C.rollout_is={own}:half C.rollout_rs={own}:far C.rollout_rs_threshold=0.3 steps=1"
    made = run(lab, "own", words, TWO_UPDATES, worker="Shifted")
    for row in tokens(made):
        assert row["rollout_is_weights"] == pytest.approx(math.exp(-row["gap"] / 2), rel=1e-4)
        assert row["kept_mask"] == (abs(row["gap"]) <= 0.3)
    assert "rollout_corr/rollout_rs_far_mean" in made.rows[0]
    with pytest.raises(ConfigError, match="did you mean 'old_log_probs'") as caught:
        run(lab, "wrong", f"C.rollout_is={own}:wrong")
    assert "-> weights per token, >= 0" in str(caught.value)


@pytest.mark.parametrize("word", ["C.rollout_is=token", "C.bypass_mode=true"])
def test_an_engine_without_log_probs_is_refused(lab, word):
    with pytest.raises(EngineError, match="not finite") as caught:
        run(lab, f"silent {word}", word, worker="Silent")
    assert "the first in sample 0" in str(caught.value) and "rollout.name=native" in str(caught.value)


def planned(lab, words):
    config = lab.config(words)
    return plan_run(config, advantage_estimator(config.algorithm.adv_estimator), 1)


RECOMPUTED = """
GRPO C.rollout_is=token | False
GRPO C.rollout_is=token C.rollout_rs=token_k2 C.rollout_rs_threshold=0.1 | False
GAE C.rollout_is=token | False
GAE C.rollout_rs=token_k2 C.rollout_rs_threshold=0.1 | True
GRPO C.rollout_is=token C.rollout_is_batch_normalize=true | True
GAE C.bypass_mode=true C.rollout_rs=token_k2 C.rollout_rs_threshold=0.1 | False
"""


@pytest.mark.parametrize(("words", "recomputes"), rows(RECOMPUTED))
def test_old_log_probs_are_recomputed_only_where_they_must_be(lab, words, recomputes):
    assert str(planned(lab, words).recompute_old) == recomputes


def test_bypass_mode_is_refused_where_its_forward_is_needed(lab):
    with pytest.raises(ConfigError, match="ref_kl to compute") as caught:
        planned(lab, "algorithm.use_kl_in_reward=true algorithm.kl_penalty=full C.bypass_mode=true")
    assert caught.value.field == "algorithm.rollout_correction.bypass_mode"


def test_normalised_weights_have_mean_one(lab):
    words = "C.rollout_is=token C.rollout_is_batch_normalize=true steps=1"
    made = run(lab, "normalised", words, worker="Shifted")
    raw = np.array([min(math.exp(-row["gap"]), 2.0) for row in tokens(made)])
    assert [row["rollout_is_weights"] for row in tokens(made)] == pytest.approx(raw / raw.mean(), abs=1e-4)
    factor = made.rows[0]["rollout_corr/rollout_is_batch_norm_factor"]
    assert factor == pytest.approx(raw.mean(), rel=1e-4)
