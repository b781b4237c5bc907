"""The defaults that users expect, and the values of keys that nobody set."""

from __future__ import annotations

import pytest

from tandem.config.actor import ActorConfig
from tandem.config.batching import Batching
from tandem.config.critic import CriticConfig, CriticModelConfig
from tandem.config.model import ModelConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, value_at
from tandem.config.supervised import RMConfig, SFTConfig

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

DEFAULTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "data.shuffle": True,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.val_batch_size": None,
    "data.val_files": (),
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.trust_remote_code": False,
    f"{A}.strategy": "fsdp2",
    f"{A}.ppo_mini_batch_size": 1024,
    f"{A}.ppo_micro_batch_size_per_gpu": None,
    f"{A}.ppo_epochs": 1,
    f"{A}.shuffle": False,
    f"{A}.clip_ratio": 0.2,
    f"{A}.clip_ratio_low": 0.2,
    f"{A}.clip_ratio_high": 0.2,
    f"{A}.clip_ratio_c": 3.0,
    f"{A}.tau_pos": 1.0,
    f"{A}.tau_neg": 1.05,
    f"{A}.policy_loss.loss_mode": "vanilla",
    f"{A}.policy_loss.clip_cov_ratio": 0.0002,
    f"{A}.policy_loss.clip_cov_lb": 1.0,
    f"{A}.policy_loss.clip_cov_ub": 5.0,
    f"{A}.policy_loss.kl_cov_ratio": 0.0002,
    f"{A}.policy_loss.ppo_kl_coef": 0.1,
    f"{A}.policy_loss.dro_beta": None,
    f"{A}.loss_agg_mode": None,
    "critic.loss_agg_mode": None,
    f"{A}.loss_scale_factor": 512,
    f"{A}.entropy_coeff": 0,
    f"{A}.use_kl_loss": False,
    f"{A}.kl_loss_coef": 0.001,
    f"{A}.kl_loss_type": "low_var_kl",
    f"{A}.use_dynamic_bsz": False,
    f"{A}.ppo_max_token_len_per_gpu": 16384,
    f"{A}.ulysses_sequence_parallel_size": 1,
    f"{A}.optim.lr": 1e-6,
    f"{A}.optim.weight_decay": 0.01,
    f"{A}.optim.betas": (0.9, 0.999),
    f"{A}.optim.clip_grad": 1.0,
    f"{A}.optim.optimizer": "adamw",
    f"{A}.optim.lr_scheduler_type": "constant",
    f"{A}.fsdp_config.param_offload": False,
    f"{A}.fsdp_config.optimizer_offload": False,
    f"{A}.fsdp_config.reshard_after_forward": True,
    f"{A}.fsdp_config.forward_prefetch": False,
    f"{A}.fsdp_config.model_dtype": "fp32",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": False,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 16384,
    f"{R}.name": "native",
    f"{R}.n": 1,
    f"{R}.temperature": 1.0,
    f"{R}.top_k": -1,
    f"{R}.top_p": 1.0,
    f"{R}.gpu_memory_utilization": None,
    f"{R}.tensor_model_parallel_size": 1,
    f"{R}.max_num_batched_tokens": 8192,
    f"{R}.max_num_seqs": 256,
    f"{R}.val_kwargs.temperature": 0,
    f"{R}.val_kwargs.n": 1,
    f"{R}.val_kwargs.do_sample": False,
    "critic.cliprange_value": 0.5,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.forward_max_token_len_per_gpu": 32768,
    "critic.ppo_mini_batch_size": 1024,
    "critic.optim.lr": 1e-5,
    "critic.optim.clip_grad": 1.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "custom_reward_function.path": None,
    "custom_reward_function.name": "compute_score",
    "trainer.default_local_dir": "runs/tandem/default",
    "trainer.logger": ("console",),
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.resume_mode": "auto",
    "trainer.resume_with_changes": False,
    "trainer.critic_warmup": 0,
    "trainer.max_ckpt_to_keep": None,
    "trainer.keep_best": None,
    "trainer.keep_best_mode": "max",
    "trainer.async_save": False,
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_default(load, name):
    assert value_at(load().config, name) == DEFAULTS[name]


INHERITED = {
    "data.seed": ("trainer.seed", "7", 7),
    "actor_rollout_ref.actor.clip_ratio_low": (f"{A}.clip_ratio", "0.3", 0.3),
    "actor_rollout_ref.actor.clip_ratio_high": (f"{A}.clip_ratio", "0.3", 0.3),
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": (f"{A}.use_dynamic_bsz", "true", True),
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": (f"{A}.use_dynamic_bsz", "true", True),
    "critic.use_dynamic_bsz": (f"{A}.use_dynamic_bsz", "true", True),
    "critic.ppo_mini_batch_size": (f"{A}.ppo_mini_batch_size", "64", 64),
    "critic.ppo_epochs": (f"{A}.ppo_epochs", "3", 3),
    "critic.shuffle": (f"{A}.shuffle", "true", True),
    "critic.loss_agg_mode": (f"{A}.loss_agg_mode", "token-sum", "token-sum"),
    "critic.forward_micro_batch_size_per_gpu": ("critic.ppo_micro_batch_size_per_gpu", "8", 8),
}


@pytest.mark.parametrize("name", INHERITED)
def test_unset_key_takes_the_value_it_inherits(load, name):
    source, text, value = INHERITED[name]
    assert value_at(load(f"{source}={text}").config, name) == value
    assert value_at(load(f"{source}={text}", f"{name}=null").config, name) == value


def test_token_budgets_inherit_through_two_steps(load):
    config = load(
        f"{A}.use_dynamic_bsz=true",
        f"{A}.ppo_max_token_len_per_gpu=2000",
        "critic.ppo_max_token_len_per_gpu=3000",
    ).config
    assert config.actor_rollout_ref.ref.log_prob_batching == Batching(max_tokens=2000)
    assert config.actor_rollout_ref.rollout.log_prob_batching == Batching(max_tokens=2000)
    assert config.critic.forward_batching == Batching(max_tokens=3000)


def test_model_folders_are_inherited(load, model):
    config = load().config
    assert config.actor_rollout_ref.model.tokenizer_path == model
    assert config.critic.model.path == model
    assert load("data.max_response_length=99").config.actor_rollout_ref.actor.loss_scale_factor == 99


def test_an_inheriting_key_that_is_set_keeps_its_own_value(load):
    config = load("critic.ppo_epochs=2", f"{A}.ppo_epochs=5", f"{A}.clip_ratio_high=0.28").config
    assert config.critic.ppo_epochs == 2
    assert (
        config.actor_rollout_ref.actor.clip_ratio_low,
        config.actor_rollout_ref.actor.clip_ratio_high,
    ) == (
        0.2,
        0.28,
    )


def test_batching_follows_the_dynamic_switch(load):
    fixed = load(f"{A}.ppo_micro_batch_size_per_gpu=4").config
    assert fixed.actor_rollout_ref.actor.train_batching == Batching(max_samples=4)
    assert fixed.critic.train_batching == Batching()
    dynamic = load(f"{A}.use_dynamic_bsz=true", f"{A}.ppo_micro_batch_size_per_gpu=4").config
    assert dynamic.actor_rollout_ref.actor.train_batching == Batching(max_tokens=16384)
    assert dynamic.critic.train_batching == Batching(max_tokens=32768)


def test_sections_built_on_their_own_hold_the_same_values_as_loaded_ones(load, model):
    config = load().config
    assert ActorConfig() == config.actor_rollout_ref.actor
    assert RolloutConfig() == config.actor_rollout_ref.rollout
    assert ModelConfig(path=model) == config.actor_rollout_ref.model
    assert CriticConfig(model=CriticModelConfig(path=model), optim=config.critic.optim) == config.critic
    assert ActorConfig(clip_ratio=0.1).clip_ratio_high == 0.1


@pytest.mark.parametrize("root", [TrainConfig, SFTConfig, RMConfig])
def test_every_key_says_what_it_means_and_inherits_from_a_key(root):
    for key in keys(root).values():
        assert key.info.description, key.name
        assert key.inherits is None or key.inherits in keys(root), key.name
