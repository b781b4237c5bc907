import numpy as np
import pytest

from tests.e2e.keys import flat, responses, tries
from tests.e2e.shop import BATCH, MINI, N
from tests.e2e.watch import watch
from tests.support.runs import same_weights
from tests.support.tiny import make_model
from tests.support.words import full

BY_SAMPLES = "A.use_dynamic_bsz=false"
TWICE = "steps=2 A.ppo_mini_batch_size=4 A.optim.lr=0.02"
SAMPLES, UPDATES = BATCH * N, BATCH // MINI


@pytest.fixture
def watched(monkeypatch):
    return watch(monkeypatch)


@tries("algorithm.adv_estimator")
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_the_estimator_makes_the_advantages(shop, estimator):
    run = shop.run(f"estimator_{estimator}", f"algorithm.adv_estimator={estimator}")
    scores = np.array(run.samples(1)["scores"]).reshape(-1, N)
    assert scores.std() > 0
    others = scores.sum(1, keepdims=True) - scores
    expected = {
        "grpo": (scores - scores.mean(1, keepdims=True)) / (scores.std(1, ddof=1, keepdims=True) + 1e-6),
        "rloo": scores - others / (N - 1),
    }[estimator]
    for (row, mask), value in zip(run.each(1, "advantages", "response_mask"), expected.ravel(), strict=True):
        assert np.array(row)[np.array(mask)] == pytest.approx(value, abs=1e-5)


@tries("algorithm.use_kl_in_reward")
def test_kl_in_the_reward_lowers_it_by_the_kl(shop):
    words = "steps=2 A.optim.lr=0.02"
    scores, rewards = flat(shop.run("plain", words), 2, "token_level_scores", "token_level_rewards")
    assert (scores == rewards).all()
    run = shop.run("kl_in_reward", words, "algorithm.use_kl_in_reward=true")
    columns = ("token_level_scores", "token_level_rewards", "old_log_probs", "ref_log_probs")
    scores, rewards, old, ref = flat(run, 2, *columns)
    assert np.abs(old - ref).max() > 0.01
    assert rewards == pytest.approx(scores - 0.001 * (old - ref), abs=1e-6)


@tries("A.use_kl_loss")
def test_the_kl_loss_asks_for_the_reference(shop, base):
    assert {"actor/kl", "timing/ref"} <= set(base.rows[0])
    assert "ref_log_probs" in base.samples(1)
    run = shop.run("no_kl_loss", "A.use_kl_loss=false A.kl_loss_coef=0")
    assert {"actor/kl", "timing/ref"}.isdisjoint(run.rows[0])
    assert "ref" not in run.actor.engines


@tries("A.kl_loss_coef")
def test_the_kl_losss_weight_is_in_the_loss_and_the_gradient(shop):
    low, high = (shop.run(f"kl_coef_{c}", TWICE, f"A.kl_loss_coef={c}") for c in (0.001, 2.0))
    for run, coef in ((low, 0.001), (high, 2.0)):
        row = run.rows[1]
        assert row["actor/kl"] > 1e-3
        assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"] + coef * row["actor/kl"], abs=1e-5)
    assert high.rows[1]["actor/grad_norm"] != pytest.approx(low.rows[1]["actor/grad_norm"], rel=1e-3)
    assert not same_weights(low, high)


@tries("A.kl_loss_type")
@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl"])
def test_the_kl_losss_kind_is_its_formula(shop, kind):
    """There is one update per step, so the loss is computed at the weights that sampled."""
    run = shop.run(f"kind_{kind}", TWICE, f"A.kl_loss_type={kind}")
    now, ref = flat(run, 2, "rollout_log_probs", "ref_log_probs")
    gap = (now - ref).astype(np.float64)
    low_var = np.minimum(np.exp(-gap) - 1 + gap, 10)
    expected = {"kl": gap, "abs": np.abs(gap), "mse": gap**2 / 2, "low_var_kl": low_var}[kind]
    assert np.abs(gap).max() > 0.01
    assert run.rows[1]["actor/kl"] == pytest.approx(expected.mean(), rel=1e-3, abs=1e-5)


@tries("A.entropy_coeff")
def test_the_entropy_bonus_is_in_the_loss_and_the_gradient(shop):
    plain, bonus = (
        shop.run(f"entropy_{c}", f"A.ppo_mini_batch_size=4 A.entropy_coeff={c}").rows[0] for c in (0, 0.5)
    )
    assert bonus["actor/entropy"] == pytest.approx(plain["actor/entropy"])
    loss = bonus["actor/pg_loss"] - 0.5 * bonus["actor/entropy"]
    assert bonus["actor/loss"] == pytest.approx(loss, abs=1e-5)
    assert bonus["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=1e-3)


@tries("trainer.critic_warmup")
def test_critic_warm_up_leaves_the_policy_alone(shop):
    cold = shop.run("cold", "GAE steps=2")
    warm = shop.run("warm", "GAE steps=2 trainer.critic_warmup=1")
    assert (cold.actor.actor.version, warm.actor.actor.version) == (2 * UPDATES, UPDATES)
    assert "actor/loss" not in warm.rows[0] and "critic/loss" in warm.rows[0]


@tries("M.path")
def test_the_model_is_the_one_in_the_folder(shop, base):
    other = make_model(shop.folder / "other_model", seed=1, num_hidden_layers=3)
    run = shop.run("other_model", f"M.path={other}")
    assert [len(run.actor.engines[role].module.decoder.layers) for role in ("actor", "ref")] == [3, 3]
    assert responses(run) != responses(base)


@tries("M.use_remove_padding")
def test_without_packing_each_micro_batch_is_a_rectangle(shop, watched):
    words = f"{BY_SAMPLES} A.ppo_micro_batch_size_per_gpu=6"
    packed = shop.run("packed", words)
    tokens = sum(part.whole_tokens for part in watched.update)
    assert tokens == packed.rows[0]["tokens/total"]
    watched.update.clear()
    padded = shop.run("padded", words, "M.use_remove_padding=false")
    assert all(part.tokens % part.sequences == 0 for part in watched.update)
    assert sum(part.whole_tokens for part in watched.update) > tokens
    assert responses(padded) == responses(packed)
    assert padded.rows[0]["actor/grad_norm"] == pytest.approx(packed.rows[0]["actor/grad_norm"], rel=1e-4)


@tries("M.enable_gradient_checkpointing")
def test_checkpointing_runs_every_layer_again_in_the_backward_pass(shop, watched):
    shop.run("checkpointed", "M.gradient_checkpointing_mode=full")
    again, watched.layer_forwards = watched.layer_forwards, 0
    shop.run("not_checkpointed", "M.enable_gradient_checkpointing=false")
    assert again == 2 * watched.layer_forwards > 0


@tries("A.optim.lr")
def test_the_learning_rate_scales_the_update(shop, base):
    start, high = (shop.run(f"lr_{lr}", f"A.optim.lr={lr}") for lr in ("0", "1e-3"))
    assert [run.rows[0]["actor/lr"] for run in (start, base, high)] == [0, 1e-6, 1e-3]
    first = start.weights()
    for run, rate in ((base, 1e-6), (high, 1e-3)):
        moved = max(float((first[name] - value).abs().max()) for name, value in run.weights().items())
        assert 0.3 * rate < moved < 5 * rate


@tries("A.ppo_mini_batch_size")
@pytest.mark.parametrize("size", [1, 4])
def test_there_is_an_update_per_mini_batch(shop, size, watched):
    words = f"A.ppo_mini_batch_size={size} {BY_SAMPLES} A.ppo_micro_batch_size_per_gpu={SAMPLES}"
    run = shop.run(f"mini_{size}", words)
    assert run.actor.actor.version == 4 // size
    assert [part.sequences for part in watched.update] == [size * N] * (4 // size)


PHASES = {
    "update": "A.use_dynamic_bsz A.ppo_micro_batch_size_per_gpu A.ppo_max_token_len_per_gpu",
    "old_log_prob": "R.log_prob_use_dynamic_bsz R.log_prob_micro_batch_size_per_gpu "
    "R.log_prob_max_token_len_per_gpu",
    "ref": "REF.log_prob_use_dynamic_bsz REF.log_prob_micro_batch_size_per_gpu "
    "REF.log_prob_max_token_len_per_gpu",
}


@tries(" ".join(PHASES.values()))
@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_is_cut_by_its_own_keys_and_no_other_phase_is(shop, phase, watched):
    dynamic, samples, budget = PHASES[phase].split()
    runs = UPDATES if phase == "update" else 1
    seen = getattr(watched, phase)
    others = [getattr(watched, other) for other in PHASES if other != phase]

    shop.run(f"{phase}_by_samples", f"{dynamic}=false {samples}=2")
    assert [part.sequences for part in seen] == [2] * (SAMPLES // 2)
    assert all(part.whole_tokens <= 40 for other in others for part in other)
    kept = [len(other) for other in others]

    seen.clear()
    shop.run(f"{phase}_by_tokens", f"{samples}=1 {budget}=28")
    assert max(part.whole_tokens for part in seen) <= 28
    assert runs < len(seen) < SAMPLES
    assert [len(other) for other in others] == [2 * count for count in kept]

    seen.clear()
    shop.run(f"{phase}_in_one", f"{budget}=1000")
    assert len(seen) == runs


OFFLOADS = {
    "REF.fsdp_config.param_offload": "ref parameters",
    "A.fsdp_config.param_offload": "actor parameters",
    "A.fsdp_config.optimizer_offload": "actor optimizer",
}


@tries(" ".join(OFFLOADS))
@pytest.mark.parametrize("name", OFFLOADS)
def test_offload_moves_its_part_around_each_phase(shop, name, watched):
    off = [f"{other}=false" for other in OFFLOADS]
    shop.run("nothing_offloaded", *off)
    assert watched.moved.total() == 0
    run = shop.run(f"offloaded_{OFFLOADS[name].replace(' ', '_')}", *off, f"{name}=true")
    assert [part for part, count in watched.moved.items() if count > 2] == [OFFLOADS[name]]
    assert run.actor.actor.state_info()["offload_applies"] is False
    (told,) = [sentence for sentence in run.said if "no effect on a CPU" in sentence]
    assert told.startswith(f"{full(name)}: ")
