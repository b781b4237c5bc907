"""OpenRLHF's settings (`openrlhf.cli.train_ppo_ray` of 0.9) as a config of Tandem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.config.root import TrainConfig
from tandem.errors import ConfigError
from tandem.migrate.peer import REFUSED, Peer, Verdict, absent, nothing, reckoned, to
from tandem.migrate.trl import Migrated
from tandem.migrate.trl_source import options, typed

MODULE = "openrlhf.cli.train_ppo_ray"

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_UNBOUNDED = 1e9
_SIZES = "prompts, where train_batch_size counts samples; the file shows the arithmetic"
_BOTH = "for the actor and the critic"
_PLACES = nothing("all roles share the actor's devices; trainer.resource_pools and placement part them")
_DEEPSPEED = nothing("training is sharded by FSDP2; there is no DeepSpeed")
_SYNC = nothing("weights reach the engine in its own way, proven by digests")
_WANDB = nothing("the logger reads its own variables, WANDB_ENTITY and WANDB_RUN_GROUP")
_EVAL = reckoned("data.val_files, rollout.val_kwargs", "with eval_dataset")

TABLE: dict[str, tuple[Any, Verdict]] = {
    "pretrain": (None, to(f"{_MODEL}.path", why="a local folder")),
    "reward_pretrain": (None, reckoned("reward_model.model.path", "one model, reward_model.enable=true")),
    "remote_rm_url": (
        None,
        reckoned("custom_reward_function.path", "a Python file; there are no remote ones"),
    ),
    "critic_pretrain": (None, reckoned("critic.model.path", "with gae")),
    "actor_num_nodes": (1, to("trainer.nnodes")),
    "actor_num_gpus_per_node": (8, to("trainer.n_gpus_per_node")),
    **dict.fromkeys(("ref_num_nodes", "reward_num_nodes", "critic_num_nodes"), (1, _PLACES)),
    **dict.fromkeys(("ref_num_gpus_per_node", "reward_num_gpus_per_node"), (8, _PLACES)),
    "critic_num_gpus_per_node": (8, _PLACES),
    **dict.fromkeys(
        ("colocate_actor_ref", "colocate_critic_reward", "colocate_all_models"), (False, _PLACES)
    ),
    "vllm_num_engines": (None, reckoned(f"{_ROLLOUT}.name", "vllm; 0 is native")),
    "vllm_tensor_parallel_size": (1, reckoned(f"{_ROLLOUT}.tensor_model_parallel_size", "with vLLM")),
    "vllm_gpu_memory_utilization": (0.95, reckoned(f"{_ROLLOUT}.gpu_memory_utilization", "with vLLM")),
    **dict.fromkeys(("vllm_sync_backend",), ("nccl", _SYNC)),
    "vllm_sync_with_ray": (False, _SYNC),
    "enable_prefix_caching": (False, to(f"{_ROLLOUT}.enable_prefix_caching")),
    "enforce_eager": (False, to(f"{_ROLLOUT}.enforce_eager")),
    "vllm_enable_sleep": (
        False,
        nothing("engines free their cache beside training, rollout.free_cache_engine"),
    ),
    "enable_vllm_is_correction": (False, reckoned("algorithm.rollout_correction.rollout_is", "token")),
    "vllm_is_truncated_threshold": (
        2,
        reckoned("algorithm.rollout_correction.rollout_is_threshold", "with it"),
    ),
    "async_train": (False, absent("generation and learning take turns")),
    "async_queue_size": (1, absent("generation and learning take turns")),
    "eval_steps": (-1, to("trainer.test_freq")),
    "save_steps": (-1, to("trainer.save_freq")),
    "logging_steps": (1, nothing("every step is a line of metrics.jsonl and of each logger")),
    "ckpt_path": ("./ckpt/checkpoints_ppo_ray", to("trainer.default_local_dir")),
    "save_path": ("./ckpt", nothing("`tandem export` writes the model's folder from a checkpoint")),
    "save_hf_ckpt": (False, nothing("`tandem export` writes the model's folder from a checkpoint")),
    "disable_ds_ckpt": (False, _DEEPSPEED),
    "max_ckpt_num": (3, to("trainer.max_ckpt_to_keep")),
    "max_ckpt_mem": (1e8, absent("checkpoints are counted, trainer.max_ckpt_to_keep")),
    "load_checkpoint": (False, to("trainer.resume_mode", {True: "auto", False: "disable"})),
    "use_ds_universal_ckpt": (False, nothing("checkpoints go on at any number of devices")),
    "local_rank": (-1, nothing("each rank is told its place by the controller")),
    "zero_stage": (2, _DEEPSPEED),
    "zpg": (1, absent("fsdp_config.fsdp_size sets how many devices share one copy")),
    "gradient_checkpointing": (False, to(f"{_MODEL}.enable_gradient_checkpointing")),
    "gradient_checkpointing_use_reentrant": (False, nothing("recomputation is PyTorch's without re-entry")),
    "deepcompile": (False, _DEEPSPEED),
    "bf16": (False, to(f"{_ACTOR}.fsdp_config.dtype", {True: "bf16", False: "fp32"})),
    "enable_ema": (False, absent("no average of weights is kept")),
    "ema_beta": (0.992, absent("no average of weights is kept")),
    "adam_offload": (False, reckoned(f"{_ACTOR}.optim.optimizer, critic.optim.optimizer", "adamw_cpu")),
    "actor_init_on_gpu": (False, nothing("models are read shard by shard")),
    "attn_implementation": (
        "flash_attention_2",
        to(f"{_MODEL}.attn_implementation", {"eager": REFUSED, "flash_attention_2": None, "sdpa": "torch"}),
    ),
    "use_liger_kernel": (False, to(f"{_MODEL}.use_liger", {False: None})),
    "grad_accum_dtype": (None, nothing("gradients are summed in fp32")),
    "overlap_comm": (False, _DEEPSPEED),
    "disable_fast_tokenizer": (False, nothing("tokenizers are the fast ones")),
    "deepspeed_enable_sleep": (
        False,
        reckoned(f"{_ACTOR}.fsdp_config.param_offload, optimizer_offload", "what waits on the host"),
    ),
    "ds_tensor_parallel_size": (1, to(f"{_ACTOR}.fsdp_config.tensor_parallel_size")),
    "packing_samples": (False, nothing("sequences are packed end to end and never padded")),
    "use_dynamic_batch": (False, to(f"{_ACTOR}.use_dynamic_bsz")),
    "rollout_max_tokens_per_gpu": (None, reckoned(f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", "with it")),
    "train_max_tokens_per_gpu": (
        16192,
        reckoned(f"{_ACTOR}.ppo_max_token_len_per_gpu", "with use_dynamic_batch"),
    ),
    "load_in_4bit": (False, absent("weights are not quantised")),
    "lora_rank": (0, to(f"{_MODEL}.lora_rank")),
    "lora_alpha": (16, reckoned(f"{_MODEL}.lora_alpha", "with lora_rank")),
    "target_modules": ("all-linear", reckoned(f"{_MODEL}.target_modules", "with lora_rank")),
    "lora_dropout": (0, absent("adapters are trained without dropout")),
    "num_episodes": (1, to("trainer.total_epochs")),
    "rollout_batch_size": (1024, to("data.train_batch_size", why="prompts in both")),
    "train_batch_size": (128, reckoned(f"{_ACTOR}.ppo_mini_batch_size", _SIZES)),
    "vllm_generate_batch_size": (None, absent("prompts of one step are generated for that step")),
    "rollout_tasks_per_gpu": (32, nothing("the engine schedules its requests")),
    "micro_rollout_batch_size": (
        8,
        reckoned(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "the reference's too"),
    ),
    "micro_train_batch_size": (4, reckoned(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "the critic's too")),
    "max_epochs": (1, to(f"{_ACTOR}.ppo_epochs")),
    "prompt_max_len": (1024, to("data.max_prompt_length")),
    "generate_max_len": (1024, to("data.max_response_length")),
    "max_len": (None, absent("prompts and responses have limits of their own")),
    "max_samples": (1e8, reckoned("data.train_max_samples", "rows")),
    "max_norm": (1.0, reckoned(f"{_ACTOR}.optim.clip_grad, critic.optim.clip_grad", _BOTH)),
    "l2": (0.0, reckoned(f"{_ACTOR}.optim.weight_decay, critic.optim.weight_decay", _BOTH)),
    "ptx_coef": (0.05, nothing("train_ppo_ray mixes in no pre-training data either")),
    "eps_clip": (0.2, reckoned(f"{_ACTOR}.clip_ratio", "unless eps_clip_low_high is given")),
    "eps_clip_low_high": (None, reckoned(f"{_ACTOR}.clip_ratio_low, clip_ratio_high", "one each")),
    "dual_clip": (None, reckoned(f"{_ACTOR}.clip_ratio_c", "unset, a bound out of reach")),
    "value_clip": (0.5, reckoned("critic.cliprange_value", "with gae")),
    "lambd": (1, reckoned("algorithm.lam", "with gae")),
    "gamma": (1, reckoned("algorithm.gamma", "with gae and reinforce")),
    "normalize_reward": (False, absent("rewards are not normalised by a running mean; advantages are")),
    "top_p": (1.0, to(f"{_ROLLOUT}.top_p")),
    "temperature": (1.0, to(f"{_ROLLOUT}.temperature")),
    "seed": (42, to("trainer.seed")),
    "full_determinism": (False, to(f"{_ACTOR}.fsdp_config.full_determinism")),
    "freezing_actor_steps": (-1, reckoned("trainer.critic_warmup", "with gae")),
    "n_samples_per_prompt": (1, to(f"{_ROLLOUT}.n")),
    "save_value_network": (False, nothing("checkpoints hold the critic; `tandem export` writes it")),
    "actor_learning_rate": (1e-6, to(f"{_ACTOR}.optim.lr")),
    "critic_learning_rate": (9e-6, reckoned("critic.optim.lr", "with gae")),
    "lr_warmup_ratio": (0.03, reckoned(f"{_ACTOR}.optim.lr_warmup_steps_ratio, critic.optim's", _BOTH)),
    "lr_scheduler": (
        "cosine_with_min_lr",
        reckoned(f"{_ACTOR}.optim.lr_scheduler_type, min_lr_ratio, critic.optim's", "to a tenth of lr"),
    ),
    "kl_target": (None, reckoned("algorithm.kl_ctrl.target_kl", "type=adaptive")),
    "kl_horizon": (10000, reckoned("algorithm.kl_ctrl.horizon", "with kl_target")),
    "init_kl_coef": (
        0.01,
        reckoned("algorithm.kl_ctrl.kl_coef, or actor.kl_loss_coef with use_kl_loss", "0: none"),
    ),
    "use_kl_loss": (False, to(f"{_ACTOR}.use_kl_loss")),
    "kl_estimator": (
        "k1",
        reckoned("algorithm.kl_penalty, or actor.kl_loss_type with use_kl_loss", "its name"),
    ),
    "policy_loss_type": ("ppo", to(f"{_ACTOR}.policy_loss.loss_mode", {"ppo": "vanilla"})),
    "aux_loss_coef": (0, absent("mixtures of experts are trained without an auxiliary loss")),
    "entropy_loss_coef": (None, to(f"{_ACTOR}.entropy_coeff")),
    "adam_betas": ((0.9, 0.95), reckoned(f"{_ACTOR}.optim.betas, critic.optim.betas", _BOTH)),
    "reward_clip_range": ((-10, 10), absent("clip the reward in the reward function")),
    "advantage_estimator": (
        "gae",
        to(
            "algorithm.adv_estimator",
            {
                "reinforce": "reinforce_plus_plus",
                "reinforce_baseline": "reinforce_plus_plus_baseline",
                "group_norm": "grpo",
            },
        ),
    ),
    "no_advantage_std_norm": (False, absent("the estimators divide as their papers do; dr_grpo does not")),
    "overlong_buffer_len": (None, reckoned("reward_model.overlong_buffer.len", "enable=true")),
    "overlong_penalty_factor": (
        1,
        reckoned("reward_model.overlong_buffer.penalty_factor", "with the buffer"),
    ),
    "ring_attn_size": (1, to(f"{_ACTOR}.ulysses_sequence_parallel_size", why="shares heads, not a ring")),
    "ring_head_stride": (1, nothing("sequences are shared by heads, without a ring")),
    "value_head_prefix": ("score", nothing("the critic's head is its own, zero at the start")),
    "ref_reward_offload": (False, to("actor_rollout_ref.ref.fsdp_config.param_offload")),
    "agent_func_path": (None, absent("there are no tools in training")),
    "prompt_data": (None, reckoned("data.train_files", "parquet with the columns that `tandem train` reads")),
    "prompt_data_probs": (None, absent("a mixture is one file")),
    **dict.fromkeys(("prompt_split", "eval_split"), ("train", nothing("a file holds one split"))),
    "eval_dataset": (None, _EVAL),
    "eval_temperature": (0.6, _EVAL),
    "eval_n_samples_per_prompt": (4, _EVAL),
    "input_key": ("input", to("data.prompt_key")),
    "label_key": (None, absent("answers are reward_model.ground_truth in the data")),
    "input_template": (
        None,
        absent("prompts are messages, and the tokenizer's template makes texts of them"),
    ),
    "apply_chat_template": (False, nothing("messages always go through the chat template")),
    "use_wandb": (None, reckoned("trainer.logger", "the key is read from WANDB_API_KEY")),
    **dict.fromkeys(("wandb_org", "wandb_group"), (None, _WANDB)),
    "wandb_project": ("openrlhf_train_ppo", to("trainer.project_name")),
    "wandb_run_name": (None, to("trainer.experiment_name")),
    "use_tensorboard": (None, reckoned("trainer.logger", "files are in the run folder")),
    "dynamic_filtering": (False, to("algorithm.filter_groups.enable")),
    "dynamic_filtering_reward_range": ((0, 1), absent("groups whose samples all score the same are dropped")),
    "perf": (False, nothing("perf/ and timing/ are among the metrics of every run")),
    "use_ms": (False, nothing("a model is a local folder; nothing is downloaded")),
}
"""By option of `train_ppo_ray`: its default, and what it is here."""


def after_module(words: Sequence[str]) -> Sequence[str]:
    """The options of OpenRLHF's trainer in a command line; all words where it is not named."""
    for place, word in enumerate(words):
        if word.endswith((MODULE, f"{MODULE.replace('.', '/')}.py")):
            return words[place + 1 :]
    return words


def migrate_openrlhf(words: Sequence[str]) -> Migrated:
    """The config for options of `train_ppo_ray`.

    Raises:
        ConfigError: a word that belongs to no option; samples of an update that are no whole groups.
    """
    given = {name: typed(values) for name, values in options(after_module(words))}
    defaults = {name: default for name, (default, _) in TABLE.items()}
    peer = Peer(TrainConfig, {name: verdict for name, (_, verdict) in TABLE.items()}, defaults, given)
    peer.take()
    critic = peer["advantage_estimator"] == "gae"
    notes = [_sizes(peer, critic)]
    _optimizers(peer, critic)
    _loss(peer, critic)
    _kl(peer)
    _rollout(peer)
    _scores(peer, notes)
    _data(peer, notes)
    return Migrated("train", peer.config, peer.rows, notes)


def _sizes(peer: Peer, critic: bool) -> str:
    samples, n, prompts = peer["train_batch_size"], peer["n_samples_per_prompt"], peer["rollout_batch_size"]
    if samples % n or prompts * n % samples:
        raise ConfigError(
            f"an update of {samples} samples is no whole number of groups of {n}, or no share of a rollout",
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
    return (
        f"ppo_mini_batch_size: {samples} samples an update / {n} a prompt = {samples // n} prompts; "
        f"data.train_batch_size: {prompts} prompts, {prompts * n // samples} updates a step."
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
        peer.refuse("lr_scheduler", "schedules are constant, linear, cosine and wsd")
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
            "advantage_estimator", "taken as rloo; OpenRLHF divides its advantages by their deviation too"
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


def _scores(peer: Peer, notes: list[str]) -> None:
    remote = str(peer["remote_rm_url"] or "")
    if remote.endswith(".py"):
        peer.put("custom_reward_function.path", remote)
        peer.put("custom_reward_function.name", "reward_func")
        notes.append(
            "custom_reward_function: reward_func(queries, prompts, labels) scores lists in OpenRLHF; here a "
            "function of (data_source, solution_str, ground_truth, extra_info) scores one."
        )
    elif remote:
        peer.refuse("remote_rm_url", "no reward is asked of a server; a function of one's own may do it")
    elif peer["reward_pretrain"]:
        peer.put("reward_model.enable", True)
        peer.put("reward_model.model.path", peer["reward_pretrain"])
    if peer["overlong_buffer_len"]:
        peer.put("reward_model.overlong_buffer.enable", True)
        peer.put("reward_model.overlong_buffer.len", int(peer["overlong_buffer_len"]))
        peer.put("reward_model.overlong_buffer.penalty_factor", float(peer["overlong_penalty_factor"]))


def _data(peer: Peer, notes: list[str]) -> None:
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
    notes.append(f"data.train_files: to be written from {peer['prompt_data'] or 'the data set'} as parquet.")
