"""Suggestions for keys that another program names differently."""

from __future__ import annotations

import pytest

from tandem.config.other_names import OTHER_NAMES
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, unknown_key
from tandem.config.supervised import RMConfig, SFTConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("optim.learning_rate", f"{ACTOR}.optim.lr"),
        ("learning_rate", f"{ACTOR}.optim.lr"),
        ("learning-rate", f"{ACTOR}.optim.lr"),
        (f"{ACTOR}.optim.learning_rate", f"{ACTOR}.optim.lr"),
        ("critic.optim.learning_rate", "critic.optim.lr"),
        ("critic_learning_rate", "critic.optim.lr"),
        ("warmup_ratio", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
        ("max_grad_norm", f"{ACTOR}.optim.clip_grad"),
        ("num_generations", f"{ROLLOUT}.n"),
        ("n_samples_per_prompt", f"{ROLLOUT}.n"),
        ("orchestrator.rollouts_per_example", f"{ROLLOUT}.n"),
        ("max_completion_length", "data.max_response_length"),
        ("generate_max_len", "data.max_response_length"),
        ("num_train_epochs", "trainer.total_epochs"),
        ("max_steps", "trainer.total_training_steps"),
        ("output_dir", "trainer.default_local_dir"),
        ("model_name_or_path", "actor_rollout_ref.model.path"),
        ("pretrain", "actor_rollout_ref.model.path"),
        ("beta", f"{ACTOR}.kl_loss_coef"),
        ("epsilon_high", f"{ACTOR}.clip_ratio_high"),
        ("per_device_train_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    ],
)
def test_the_key_of_tandem_train_is_named(given: str, meant: str) -> None:
    assert unknown_key(given, keys(TrainConfig)).remedy == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("per_device_train_batch_size", "micro_batch_size_per_gpu"),
        ("max_seq_length", "data.max_length"),
        ("model_name_or_path", "model.path"),
    ],
)
@pytest.mark.parametrize("root", [SFTConfig, RMConfig])
def test_so_is_that_of_a_supervised_run(root: type[SFTConfig], given: str, meant: str) -> None:
    assert unknown_key(given, keys(root)).remedy == f"did you mean {meant}?"


def test_every_meaning_is_a_key_and_no_name_is() -> None:
    known = [name for root in (TrainConfig, SFTConfig, RMConfig) for name in keys(root)]
    for name, ends in OTHER_NAMES.items():
        assert all(any(key == end or key.endswith(f".{end}") for key in known) for end in ends), name
