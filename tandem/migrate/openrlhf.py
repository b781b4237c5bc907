"""Convert OpenRLHF's settings (`openrlhf.cli.train_ppo_ray` of version 0.9) to a config of Tandem."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.config.root import TrainConfig
from tandem.errors import ConfigError
from tandem.migrate.peer import Peer
from tandem.migrate.trl_source import options, typed
from tandem.peers.table import Rule, by_name, read_table

MODULE = "openrlhf.cli.train_ppo_ray"

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_UNBOUNDED = 1e9
TABLE: dict[str, Rule] = by_name(read_table("openrlhf.yaml"))
"""For each option of `train_ppo_ray`: its default, and its rule."""
_DEFAULTS = {name: rule.default for name, rule in TABLE.items()}


def after_module(words: Sequence[str]) -> Sequence[str]:
    """Return the words after OpenRLHF's trainer in a command line; all words if it has no trainer."""
    for place, word in enumerate(words):
        if word.endswith((MODULE, f"{MODULE.replace('.', '/')}.py")):
            return words[place + 1 :]
    return words


def migrate_openrlhf(words: Sequence[str]) -> Peer:
    """Return the config for options of `train_ppo_ray`.

    Raises:
        ConfigError: a word belongs to no option, or an update would not contain complete groups of samples.
    """
    given = {name: typed(values) for name, values in options(after_module(words))}
    peer = Peer("train", TrainConfig, TABLE, _DEFAULTS, given)
    peer.take()
    critic = peer["advantage_estimator"] == "gae"
    _sizes(peer, critic)
    _optimizers(peer, critic)
    _loss(peer, critic)
    _kl(peer)
    _rollout(peer)
    _scores(peer)
    _data(peer)
    return peer


def _sizes(peer: Peer, critic: bool) -> None:
    samples, n, prompts = peer["train_batch_size"], peer["n_samples_per_prompt"], peer["rollout_batch_size"]
    if samples % n or prompts * n % samples:
        raise ConfigError(
            f"an update of {samples} samples splits a group of {n}, or does not divide a rollout",
            field="train_batch_size",
            got=samples,
            expected=f"a multiple of n_samples_per_prompt={n} that divides {prompts * n} samples",
        )
    peer.put("data.train_batch_size", prompts, always=True)
    peer.put(f"{_ACTOR}.ppo_mini_batch_size", samples // n, always=True)
    if not peer["use_dynamic_batch"]:
        peer.put(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", peer["micro_train_batch_size"])
        peer.put(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", peer["micro_rollout_batch_size"])
        if critic:
            peer.put("critic.ppo_micro_batch_size_per_gpu", peer["micro_train_batch_size"])
        if peer["init_kl_coef"] > 0:
            peer.put(
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", peer["micro_rollout_batch_size"]
            )
    else:
        peer.put(f"{_ACTOR}.ppo_max_token_len_per_gpu", peer["train_max_tokens_per_gpu"])
        if peer["rollout_max_tokens_per_gpu"]:
            peer.put(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", peer["rollout_max_tokens_per_gpu"])
    peer.notes.append(
        f"ppo_mini_batch_size: {samples} samples per update / {n} per prompt = {samples // n} prompts; "
        f"data.train_batch_size: {prompts} prompts, {prompts * n // samples} updates per step."
    )


def _optimizers(peer: Peer, critic: bool) -> None:
    schedule = str(peer["lr_scheduler"])
    for at in (f"{_ACTOR}.optim", "critic.optim") if critic else (f"{_ACTOR}.optim",):
        peer.put(f"{at}.betas", list(peer["adam_betas"]))
        peer.put(f"{at}.weight_decay", peer["l2"])
        peer.put(f"{at}.clip_grad", peer["max_norm"])
        peer.put(f"{at}.lr_warmup_steps_ratio", peer["lr_warmup_ratio"])
        peer.put(f"{at}.lr_scheduler_type", schedule.partition("_")[0])
        if schedule == "cosine_with_min_lr":
            peer.put(f"{at}.min_lr_ratio", 0.1)
        if peer["adam_offload"]:
            peer.put(f"{at}.optimizer", "adamw_cpu")
    if schedule not in ("cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup"):
        peer.refuse("lr_scheduler", "the available schedules are constant, linear, cosine and wsd")
    if critic:
        peer.put("critic.optim.lr", peer["critic_learning_rate"])


def _loss(peer: Peer, critic: bool) -> None:
    low, high = peer["eps_clip_low_high"] or (peer["eps_clip"], peer["eps_clip"])
    peer.put(f"{_ACTOR}.clip_ratio_low", low)
    peer.put(f"{_ACTOR}.clip_ratio_high", high)
    if peer["policy_loss_type"] == "ppo":
        peer.put(f"{_ACTOR}.clip_ratio_c", peer["dual_clip"] or _UNBOUNDED)
    if critic:
        peer.put("critic.cliprange_value", peer["value_clip"])
        peer.put("algorithm.lam", float(peer["lambd"]))
        peer.put("trainer.critic_warmup", max(0, peer["freezing_actor_steps"]))
        if peer["critic_pretrain"]:
            peer.put("critic.model.path", peer["critic_pretrain"])
    if peer["advantage_estimator"] in ("gae", "reinforce"):
        peer.put("algorithm.gamma", float(peer["gamma"]))
    if peer["advantage_estimator"] == "rloo":
        peer.refuse(
            "advantage_estimator",
            "read as rloo, without OpenRLHF's division of the advantages by their standard deviation",
        )
    if peer["lora_rank"]:
        peer.put(f"{_MODEL}.lora_alpha", peer["lora_alpha"])
        peer.put(f"{_MODEL}.target_modules", peer["target_modules"])


def _kl(peer: Peer) -> None:
    coefficient = peer["init_kl_coef"]
    if coefficient <= 0:
        peer.config.pop(f"{_ACTOR}.use_kl_loss", None)
    elif peer["use_kl_loss"]:
        peer.put(f"{_ACTOR}.kl_loss_coef", coefficient)
        peer.put(f"{_ACTOR}.kl_loss_type", peer["kl_estimator"])
    else:
        peer.put("algorithm.use_kl_in_reward", True)
        peer.put("algorithm.kl_ctrl.kl_coef", coefficient)
        peer.put("algorithm.kl_penalty", peer["kl_estimator"])
        if peer["kl_target"]:
            peer.put("algorithm.kl_ctrl.type", "adaptive")
            peer.put("algorithm.kl_ctrl.target_kl", peer["kl_target"])
            peer.put("algorithm.kl_ctrl.horizon", peer["kl_horizon"])


def _rollout(peer: Peer) -> None:
    if peer["vllm_num_engines"]:
        peer.put(f"{_ROLLOUT}.name", "vllm")
        peer.put(f"{_ROLLOUT}.tensor_model_parallel_size", peer["vllm_tensor_parallel_size"])
        peer.put(f"{_ROLLOUT}.gpu_memory_utilization", peer["vllm_gpu_memory_utilization"])
    if peer["enable_vllm_is_correction"]:
        peer.put("algorithm.rollout_correction.rollout_is", "token")
        peer.put(
            "algorithm.rollout_correction.rollout_is_threshold",
            str(float(peer["vllm_is_truncated_threshold"])),
        )
    if peer["deepspeed_enable_sleep"]:
        peer.put(f"{_ACTOR}.fsdp_config.param_offload", True)
        peer.put(f"{_ACTOR}.fsdp_config.optimizer_offload", True)
    loggers = [name for name in ("wandb", "tensorboard") if peer[f"use_{name}"]]
    if loggers:
        peer.put("trainer.logger", ["console", *loggers])


def _scores(peer: Peer) -> None:
    remote = str(peer["remote_rm_url"] or "")
    if remote.endswith(".py"):
        peer.put("custom_reward_function.path", remote)
        peer.put("custom_reward_function.name", "reward_func")
        peer.notes.append(
            "custom_reward_function: in OpenRLHF, reward_func(queries, prompts, labels) scores lists; here, "
            "a function of (data_source, solution_str, ground_truth, extra_info) scores one response."
        )
    elif remote:
        peer.refuse(
            "remote_rm_url", "Tandem does not query a reward server; your own reward function can do it"
        )
    elif peer["reward_pretrain"]:
        peer.put("reward_model.enable", True)
        peer.put("reward_model.model.path", peer["reward_pretrain"])
    if peer["overlong_buffer_len"]:
        peer.put("reward_model.overlong_buffer.enable", True)
        peer.put("reward_model.overlong_buffer.len", int(peer["overlong_buffer_len"]))
        peer.put("reward_model.overlong_buffer.penalty_factor", float(peer["overlong_penalty_factor"]))


def _data(peer: Peer) -> None:
    peer.put("data.train_files", "train.parquet", always=True)
    if peer["max_samples"] < 1e8:
        peer.put("data.train_max_samples", int(peer["max_samples"]))
    if peer["eval_dataset"]:
        peer.put("data.val_files", "test.parquet", always=True)
        peer.put(f"{_ROLLOUT}.val_kwargs.do_sample", True)
        peer.put(f"{_ROLLOUT}.val_kwargs.temperature", peer["eval_temperature"])
        peer.put(f"{_ROLLOUT}.val_kwargs.n", peer["eval_n_samples_per_prompt"])
    if f"{_MODEL}.path" not in peer.config:
        peer.put(f"{_MODEL}.path", "model", always=True)
    peer.notes.append(f"data.train_files: convert {peer['prompt_data'] or 'the dataset'} to a Parquet file.")
