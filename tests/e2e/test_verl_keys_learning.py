import numpy as np
import pytest

from tests.e2e.keys import ACTOR, FAST, REF, ROLLOUT, SAMPLES, UPDATES, flat, responses, tries
from tests.e2e.shop import DOCUMENT
from tests.e2e.watch import watch
from tests.support.runs import Finished, same_weights
from tests.support.tiny import make_model

BY_SAMPLES = f"{ACTOR}.use_dynamic_bsz=false"
TWICE = ("trainer.total_training_steps=2", f"{ACTOR}.ppo_mini_batch_size=4", FAST)


@pytest.fixture
def watched(monkeypatch):
    return watch(monkeypatch)


@tries("algorithm.adv_estimator")
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_the_estimator_makes_the_advantages(shop, estimator):
    samples = shop.run(f"estimator_{estimator}", f"algorithm.adv_estimator={estimator}").samples(1)
    scores = np.array(samples["scores"]).reshape(-1, DOCUMENT[f"{ROLLOUT}.n"])
    assert scores.std() > 0
    others = scores.sum(1, keepdims=True) - scores
    expected = {
        "grpo": (scores - scores.mean(1, keepdims=True)) / (scores.std(1, ddof=1, keepdims=True) + 1e-6),
        "rloo": scores - others / (scores.shape[1] - 1),
    }[estimator]
    rows = zip(samples["advantages"], samples["response_mask"], expected.ravel(), strict=True)
    for row, mask, value in rows:
        assert np.array(row)[np.array(mask)] == pytest.approx(value, abs=1e-5)


@tries("algorithm.use_kl_in_reward")
def test_kl_in_the_reward_lowers_it_by_the_kl(shop):
    words = ("trainer.total_training_steps=2", FAST)
    plain = shop.run("no_kl_in_reward", *words)
    scores, rewards = flat(plain, 2, "token_level_scores", "token_level_rewards")
    assert (scores == rewards).all()
    run = shop.run("kl_in_reward", *words, "algorithm.use_kl_in_reward=true")
    columns = ("token_level_scores", "token_level_rewards", "old_log_probs", "ref_log_probs")
    scores, rewards, old, ref = flat(run, 2, *columns)
    assert np.abs(old - ref).max() > 0.01
    assert rewards == pytest.approx(scores - 0.001 * (old - ref), abs=1e-6)


@tries(f"{ACTOR}.use_kl_loss")
def test_the_kl_loss_asks_for_the_reference(shop, base):
    assert {"actor/kl", "timing/ref"} <= set(base.rows[0])
    assert "ref_log_probs" in base.samples(1)
    run = shop.run("no_kl_loss", f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.kl_loss_coef=0")
    assert {"actor/kl", "timing/ref"}.isdisjoint(run.rows[0])
    assert "ref" not in run.actor.engines


@tries(f"{ACTOR}.kl_loss_coef")
def test_the_kl_losss_weight_is_in_the_loss_and_the_gradient(shop):
    low, high = (shop.run(f"kl_coef_{c}", *TWICE, f"{ACTOR}.kl_loss_coef={c}") for c in (0.001, 2.0))
    for run, coef in ((low, 0.001), (high, 2.0)):
        row = run.rows[1]
        assert row["actor/kl"] > 1e-3
        assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"] + coef * row["actor/kl"], abs=1e-5)
    assert high.rows[1]["actor/grad_norm"] != pytest.approx(low.rows[1]["actor/grad_norm"], rel=1e-3)
    assert not same_weights(low, high)


@tries(f"{ACTOR}.kl_loss_type")
@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_the_kl_losss_kind_is_its_formula(shop, kind):
    """There is one update per step, so the loss is computed at the weights that sampled."""
    run = shop.run(f"kind_{kind}", *TWICE, f"{ACTOR}.kl_loss_type={kind}")
    now, ref = flat(run, 2, "rollout_log_probs", "ref_log_probs")
    gap = (now - ref).astype(np.float64)
    expected = {
        "kl": gap,
        "abs": np.abs(gap),
        "mse": gap**2 / 2,
        "low_var_kl": np.minimum(np.exp(-gap) - 1 + gap, 10),
    }[kind]
    assert np.abs(gap).max() > 0.01
    assert run.rows[1]["actor/kl"] == pytest.approx(expected.mean(), rel=1e-3, abs=1e-5)


@tries(f"{ACTOR}.entropy_coeff")
def test_the_entropy_bonus_is_in_the_loss_and_the_gradient(shop):
    words = (f"{ACTOR}.ppo_mini_batch_size=4",)
    without, bonus = (shop.run(f"entropy_{c}", *words, f"{ACTOR}.entropy_coeff={c}") for c in (0, 0.5))
    row = bonus.rows[0]
    assert row["actor/entropy"] == pytest.approx(without.rows[0]["actor/entropy"])
    assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"] - 0.5 * row["actor/entropy"], abs=1e-5)
    assert row["actor/grad_norm"] != pytest.approx(without.rows[0]["actor/grad_norm"], rel=1e-3)


@tries("trainer.critic_warmup")
def test_critic_warm_up_leaves_the_policy_alone(shop):
    words = ("algorithm.adv_estimator=gae", "trainer.total_training_steps=2")
    cold = shop.run("cold", *words)
    warm = shop.run("warm", *words, "trainer.critic_warmup=1")
    assert cold.actor.actor.version == 2 * UPDATES
    assert warm.actor.actor.version == UPDATES
    assert "actor/loss" not in warm.rows[0] and "critic/loss" in warm.rows[0]


@tries("actor_rollout_ref.model.path")
def test_the_model_is_the_one_in_the_folder(shop, base):
    other = make_model(shop.folder / "other_model", seed=1, num_hidden_layers=3)
    run = shop.run("other_model", f"actor_rollout_ref.model.path={other}")
    assert len(run.actor.actor.module.decoder.layers) == 3
    assert len(run.actor.engines["ref"].module.decoder.layers) == 3
    assert responses(run) != responses(base)


@tries("actor_rollout_ref.model.use_remove_padding")
def test_without_packing_each_micro_batch_is_a_rectangle(shop, watched):
    words = (BY_SAMPLES, f"{ACTOR}.ppo_micro_batch_size_per_gpu=6")
    packed = shop.run("packed", *words)
    tokens = sum(part.whole_tokens for part in watched.update)
    assert tokens == packed.rows[0]["tokens/total"]
    watched.update.clear()
    padded = shop.run("padded", *words, "actor_rollout_ref.model.use_remove_padding=false")
    assert all(part.tokens % part.sequences == 0 for part in watched.update)
    assert sum(part.whole_tokens for part in watched.update) > tokens
    assert responses(padded) == responses(packed)
    assert padded.rows[0]["actor/grad_norm"] == pytest.approx(packed.rows[0]["actor/grad_norm"], rel=1e-4)


@tries("actor_rollout_ref.model.enable_gradient_checkpointing")
def test_checkpointing_runs_every_layer_again_in_the_backward_pass(shop, watched):
    shop.run("checkpointed", "actor_rollout_ref.model.gradient_checkpointing_mode=full")
    again, watched.layer_forwards = watched.layer_forwards, 0
    shop.run("not_checkpointed", "actor_rollout_ref.model.enable_gradient_checkpointing=false")
    assert again == 2 * watched.layer_forwards > 0


@tries(f"{ACTOR}.optim.lr")
def test_the_learning_rate_scales_the_update(shop, base):
    start = shop.run("lr_0", f"{ACTOR}.optim.lr=0")
    high = shop.run("lr_high", f"{ACTOR}.optim.lr=1e-3")
    assert [run.rows[0]["actor/lr"] for run in (start, base, high)] == [0, 1e-6, 1e-3]

    def distance(run: Finished) -> float:
        first, last = start.weights(), run.weights()
        return max(float((first[name] - last[name]).abs().max()) for name in first)

    assert 0.3e-6 < distance(base) < 5e-6
    assert 0.3e-3 < distance(high) < 5e-3


@tries(f"{ACTOR}.ppo_mini_batch_size")
@pytest.mark.parametrize("size", [1, 4])
def test_there_is_an_update_per_mini_batch(shop, size, watched):
    run = shop.run(f"mini_{size}", f"{ACTOR}.ppo_mini_batch_size={size}", BY_SAMPLES,
                   f"{ACTOR}.ppo_micro_batch_size_per_gpu={SAMPLES}")  # fmt: skip
    assert run.actor.actor.version == 4 // size
    assert [part.sequences for part in watched.update] == [size * DOCUMENT[f"{ROLLOUT}.n"]] * (4 // size)


CUTS = ("use_dynamic_bsz", "micro_batch_size_per_gpu", "max_token_len_per_gpu")
LOG_PROB = [f"log_prob_{name}" for name in CUTS]
PHASES = {
    "update": tuple(f"{ACTOR}.{name}" for name in (CUTS[0], *(f"ppo_{name}" for name in CUTS[1:]))),
    "old_log_prob": tuple(f"{ROLLOUT}.{name}" for name in LOG_PROB),
    "ref": tuple(f"{REF}.{name}" for name in LOG_PROB),
}


@tries(*(name for names in PHASES.values() for name in names))
@pytest.mark.parametrize("phase", list(PHASES))
def test_each_phase_is_cut_by_its_own_keys(shop, phase, watched):
    dynamic, samples, budget = PHASES[phase]
    runs = UPDATES if phase == "update" else 1
    seen = getattr(watched, phase)
    others = [getattr(watched, other) for other in PHASES if other != phase]

    shop.run(f"{phase}_by_samples", f"{dynamic}=false", f"{samples}=2")
    assert [part.sequences for part in seen] == [2] * (SAMPLES // 2)
    assert all(part.whole_tokens <= 40 for other in others for part in other)
    kept = [len(other) for other in others]

    seen.clear()
    shop.run(f"{phase}_by_tokens", f"{samples}=1", f"{budget}=28")
    assert max(part.whole_tokens for part in seen) <= 28
    assert runs < len(seen) < SAMPLES
    assert [len(other) for other in others] == [2 * count for count in kept]

    seen.clear()
    shop.run(f"{phase}_in_one", f"{budget}=1000")
    assert len(seen) == runs


OFFLOADS = {
    f"{REF}.fsdp_config.param_offload": "ref parameters",
    f"{ACTOR}.fsdp_config.param_offload": "actor parameters",
    f"{ACTOR}.fsdp_config.optimizer_offload": "actor optimizer",
}


@tries(*OFFLOADS)
@pytest.mark.parametrize("name", list(OFFLOADS))
def test_offload_moves_its_part_around_each_phase(shop, name, watched):
    off = [f"{other}=false" for other in OFFLOADS]
    shop.run("nothing_offloaded", *off)
    assert watched.moved.total() == 0
    run = shop.run(f"offloaded_{OFFLOADS[name].replace(' ', '_')}", *off, f"{name}=true")
    assert [part for part, count in watched.moved.items() if count > 2] == [OFFLOADS[name]]
    assert run.actor.actor.state_info()["offload_applies"] is False
    told = [sentence for sentence in run.said if "no effect on a CPU" in sentence]
    assert len(told) == 1 and told[0].startswith(f"{name}: ")
