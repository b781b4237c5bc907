import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.errors import ConfigError
from tests.support import loop_columns

LOSS = "A.use_kl_loss=true A.kl_loss_type=full"
REWARD = "algorithm.use_kl_in_reward=true algorithm.kl_penalty=full"


@pytest.fixture(scope="module")
def reward(lab):
    return f"custom_reward_function.path={loop_columns.write(lab.folder)} custom_reward_function.name=score"


def exact(policy, reference, tokens):
    """Compute Σ p log p/q before each token with transformers' own forward in float64."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        log_p, log_q = (torch.log_softmax(model(ids).logits[0], -1) for model in (policy, reference))
    return [0.0, *(log_p.exp() * (log_p - log_q)).sum(-1)[:-1].tolist()]


@pytest.mark.equation("kl/full")
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_the_kl_of_the_second_step_is_that_of_the_first_steps_weights(lab, reward, where):
    words = (REWARD, "algorithm.kl_ctrl.kl_coef=0.3") if where == "reward" else (LOSS,)
    after_one = lab.run(f"one step {where}", *words, reward, "steps=1")
    finished = lab.run(f"two steps {where}", *words, reward)
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.float64) for _ in range(2)
    )
    missing, unexpected = policy.load_state_dict(after_one.weights(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    means, everything = [], []
    for tokens, mask in finished.each(2, "tokens", "response_mask"):
        kl = [k for k, m in zip(exact(policy, reference, tokens), mask, strict=True) if m]
        means.append(np.mean(kl))
        everything += kl
    found, (first, second) = finished.tokens(2), finished.rows
    assert "ref_hidden" not in found[0]
    if where == "reward":
        assert [token["ref_kl"] for token in found] == pytest.approx(everything, abs=1e-5)
        wanted = [t["token_level_scores"] - 0.3 * kl for t, kl in zip(found, everything, strict=True)]
        assert [token["token_level_rewards"] for token in found] == pytest.approx(wanted, abs=1e-5)
        assert (first["actor/kl_in_reward"], first["actor/kl"]) == (0.0, 0.0)
        assert second["actor/kl_in_reward"] == pytest.approx(np.mean(means), rel=1e-4)
    else:
        assert first["actor/kl"] == 0.0
        assert second["actor/kl"] == pytest.approx(np.mean(everything), rel=1e-4)
    assert np.mean(means) > 1e-2


@pytest.mark.parametrize("words", [LOSS, REWARD], ids=["loss", "reward"])
def test_adapters_are_compared_with_their_base(lab, reward, words):
    finished = lab.run(f"adapted {words}", f"M.lora_rank=4 steps=3 {words}", reward)
    assert set(finished.actor.engines) == {"actor"}
    assert finished.rows[0]["actor/kl"] == 0.0 < finished.rows[2]["actor/kl"]


def test_both_terms_at_once_and_several_updates_per_step(lab, reward):
    words = "A.ppo_mini_batch_size=2 A.use_dynamic_bsz=true A.ppo_max_token_len_per_gpu=20"
    finished = lab.run("both", LOSS, REWARD, reward, words)
    first, second = finished.rows
    assert first["actor/kl_in_reward"] == 0.0 < first["actor/kl"]  # the second update starts from the first
    assert 0 < second["actor/kl_in_reward"] < second["actor/kl"] * 10


def test_a_users_own_estimator_in_both_places(lab, reward):
    own = lab.folder / "own_kl.py"
    own.write_text("def halved(log_probs, ref_log_probs):\n    return (log_probs - ref_log_probs) / 2\n")
    in_reward = "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.3 algorithm.kl_penalty="
    in_loss = f"A.use_kl_loss=true A.kl_loss_type={own}:halved+"
    finished = lab.run("own kl", reward, f"{in_reward}{own}:halved", in_loss)
    found = finished.tokens(2)
    halves = [(token["old_log_probs"] - token["ref_log_probs"]) / 2 for token in found]
    for token, half in zip(found, halves, strict=True):
        wanted = token["token_level_scores"] - 0.3 * half
        assert token["token_level_rewards"] == pytest.approx(wanted, abs=1e-6)
    assert finished.rows[1]["actor/kl"] == pytest.approx(np.mean(halves), rel=1e-4)


def test_a_reference_class_without_a_head_cannot_be_compared_exactly(lab):
    own = lab.worker("compute_ref_log_prob")
    with pytest.raises(ConfigError, match="Own without reference_head"):
        lab.run("headless", LOSS, f"W.ref={own}")
