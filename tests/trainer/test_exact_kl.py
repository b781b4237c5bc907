"""The exact KL to the reference in whole runs, in the reward and in the loss, and KL estimators by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.errors import ConfigError
from tests.support import loop_columns
from tests.support.runs import Lab

LOSS = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full")
REWARD = ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full")
STEPS = 2


@pytest.fixture(scope="module")
def reward(lab: Lab) -> str:
    return f"custom_reward_function.path={loop_columns.write(lab.folder)}"


NAME = "custom_reward_function.name=score"


def exact(policy: Any, reference: Any, tokens: list[int]) -> list[float]:
    """Compute Σ p log p/q before each token with transformers' own forward in float64."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        log_p, log_q = (torch.log_softmax(model(ids).logits[0], -1) for model in (policy, reference))
    return [0.0, *(log_p.exp() * (log_p - log_q)).sum(-1)[:-1].tolist()]


def model_of(lab: Lab, weights: dict[str, torch.Tensor] | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(lab.model, dtype=torch.float64)
    if weights is not None:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


@pytest.mark.equation("kl/full")
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_the_kl_of_the_second_step_is_that_of_the_first_steps_weights(
    lab: Lab, reward: str, where: str
) -> None:
    words = (*(REWARD if where == "reward" else LOSS), reward, NAME, "algorithm.kl_ctrl.kl_coef=0.3")
    words = words if where == "reward" else words[:-1]
    after_one = lab.run(f"one step {where}", *words, "trainer.total_training_steps=1")
    finished = lab.run(f"two steps {where}", *words, f"trainer.total_training_steps={STEPS}")
    policy, reference = model_of(lab, after_one.weights()), model_of(lab)
    samples, means, everything = finished.samples(2), [], []
    for i, (tokens, mask) in enumerate(zip(samples["tokens"], samples["response_mask"], strict=True)):
        kl = [k * m for k, m in zip(exact(policy, reference, tokens), mask, strict=True)]
        means.append(sum(kl) / sum(mask))
        everything += [k for k, m in zip(kl, mask, strict=True) if m]
        if where == "reward":
            assert samples["ref_kl"][i] == pytest.approx(kl, abs=1e-5)
            scored = zip(samples["token_level_scores"][i], kl, strict=True)
            assert samples["token_level_rewards"][i] == pytest.approx(
                [s - 0.3 * k for s, k in scored], abs=1e-5
            )
    assert "ref_hidden" not in samples
    first, second = finished.rows
    if where == "reward":
        assert (first["actor/kl_in_reward"], first["actor/kl"]) == (0.0, 0.0)
        assert second["actor/kl_in_reward"] == pytest.approx(np.mean(means), rel=1e-4)
    else:
        assert first["actor/kl"] == 0.0
        assert second["actor/kl"] == pytest.approx(np.mean(everything), rel=1e-4)
    assert np.mean(means) > 1e-2


@pytest.mark.slow
def test_the_heavier_the_kl_loss_the_closer_the_policy_stays_to_the_reference(lab: Lab, reward: str) -> None:
    apart = []
    for coefficient in (0, 1, 100):
        finished = lab.run(
            f"drawn by {coefficient}", *LOSS, reward, NAME, "actor_rollout_ref.actor.optim.lr=0.003",
            f"actor_rollout_ref.actor.kl_loss_coef={coefficient}", "trainer.total_training_steps=6",
        )  # fmt: skip
        assert finished.rows[0]["actor/kl"] == 0.0
        apart.append(finished.rows[-1]["actor/kl"])
    assert apart[0] > 2 * apart[1] > 4 * apart[2] > 0


@pytest.mark.parametrize("words", [LOSS, REWARD], ids=["loss", "reward"])
def test_adapters_are_compared_with_their_base(lab: Lab, reward: str, words: tuple[str, ...]) -> None:
    """The base model serves as the reference; the numbers equal those of a separate reference."""
    adapted = ("actor_rollout_ref.model.lora_rank=4", *words, reward, NAME, "trainer.total_training_steps=3")
    finished = lab.run(f"adapted {words[0]}", *adapted)
    assert set(finished.actor.engines) == {"actor"}
    assert finished.rows[0]["actor/kl"] == 0.0 < finished.rows[2]["actor/kl"]


def test_both_terms_at_once_and_several_updates_per_step(lab: Lab, reward: str) -> None:
    finished = lab.run(
        "both", *LOSS, *REWARD, reward, NAME, "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20",
    )  # fmt: skip
    first, second = finished.rows
    assert first["actor/kl_in_reward"] == 0.0 < first["actor/kl"]  # the second update starts from the first
    assert 0 < second["actor/kl_in_reward"] < second["actor/kl"] * 10


def test_a_users_own_estimator_in_both_places(lab: Lab, reward: str) -> None:
    own = lab.folder / "own_kl.py"
    own.write_text("def halved(log_probs, ref_log_probs):\n    return (log_probs - ref_log_probs) / 2\n")
    finished = lab.run(
        "own kl", reward, NAME, "algorithm.use_kl_in_reward=true", f"algorithm.kl_penalty={own}:halved",
        "algorithm.kl_ctrl.kl_coef=0.3", "actor_rollout_ref.actor.use_kl_loss=true",
        f"actor_rollout_ref.actor.kl_loss_type={own}:halved+",
    )  # fmt: skip
    samples = finished.samples(2)
    columns = zip(*(samples[n] for n in ("old_log_probs", "ref_log_probs", "response_mask")), strict=True)
    halves = [[(a - b) / 2 * m for a, b, m in zip(*row, strict=True)] for row in columns]
    for found, scores, half in zip(
        samples["token_level_rewards"], samples["token_level_scores"], halves, strict=True
    ):
        assert found == pytest.approx([s - 0.3 * h for s, h in zip(scores, half, strict=True)], abs=1e-6)
    tokens = sum(map(sum, samples["response_mask"]))
    assert finished.rows[1]["actor/kl"] == pytest.approx(sum(map(sum, halves)) / tokens, rel=1e-4)


def test_a_users_own_estimator_with_another_signature_is_refused_before_anything_starts(lab: Lab) -> None:
    own = lab.folder / "bad_kl.py"
    own.write_text("def bad(logits): ...\n")
    with pytest.raises(ConfigError, match="the signature of this KL estimator") as caught:
        lab.run("bad", "algorithm.use_kl_in_reward=true", f"algorithm.kl_penalty={own}:bad")
    assert "ref_log_probs" in str(caught.value.expected)
    assert not (lab.folder / "bad").exists()


def test_a_reference_class_without_a_head_cannot_be_compared_exactly(lab: Lab) -> None:
    path: Path = lab.folder / "own_ref.py"
    path.write_text(
        "from tandem.runtime import Worker, register\n"
        "class Own(Worker):\n    @register()\n    def compute_ref_log_prob(self, batch): ...\n"
    )
    with pytest.raises(ConfigError, match="Own without reference_head"):
        lab.run("headless", *LOSS, f"trainer.worker_classes={{ref: '{path}:Own'}}")
