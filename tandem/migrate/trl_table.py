"""TRL's settings (1.16) and what each is here: of policies, answers and rewards."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from tandem.migrate.peer import REFUSED, Verdict, absent, nothing, reckoned, to

FIELDS: dict[str, dict[str, Any]] = json.loads(
    files("tandem.migrate").joinpath("trl_1_16.json").read_text(encoding="utf-8")
)
"""By class, the fields and their defaults."""

_ACTOR = "actor_rollout_ref.actor"
_OPTIM = f"{_ACTOR}.optim"
_FSDP = f"{_ACTOR}.fsdp_config"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_ADAPTIVE = f"{_ACTOR}.adaptive_entropy"

_SIZES = "prompts, where TRL counts completions; the file shows the arithmetic"
_STEPS = "training steps, of which each may hold several of TRL's optimizer steps"
_LOADING = "rows are read by the trainer's own loader"
_LOGS = nothing("every step is a line of metrics.jsonl and of each logger")
_SAMPLES = nothing("all samples are kept in samples/; trainer.samples_freq thins them")
_PACKED = nothing("sequences are packed end to end and never padded")
_HUB = absent("nothing is uploaded; `tandem export` writes a folder for the Hub")
_DDP = nothing("training is sharded by FSDP2, and there is no DDP")
_BNB = absent("weights are not quantised")
_SHARDED = absent("sharding is set by fsdp_config's keys: fsdp_size, tensor_parallel_size, param_offload")
_EVAL = nothing("validation generates and scores; there are no predictions to gather")
_VESPO = absent("there is no VESPO loss")
_SERVER = absent("a vLLM server is started by rollout.mode=server, or given by rollout.server.urls")

_TRAINING: dict[str, Verdict] = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        reckoned(
            f"data.train_batch_size, {_ACTOR}.ppo_mini_batch_size, ppo_micro_batch_size_per_gpu", _SIZES
        ),
    ),
    "learning_rate": to(f"{_OPTIM}.lr"),
    "weight_decay": to(f"{_OPTIM}.weight_decay"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), reckoned(f"{_OPTIM}.betas", "both in one list")),
    "adam_epsilon": to(f"{_OPTIM}.eps"),
    "max_grad_norm": to(f"{_OPTIM}.clip_grad", {0: 1e9}, why="0, no clipping, is a bound out of reach"),
    "lr_scheduler_type": to(
        f"{_OPTIM}.lr_scheduler_type",
        {
            "constant_with_warmup": "constant",
            **dict.fromkeys(
                ("cosine_with_restarts", "polynomial", "inverse_sqrt", "reduce_lr_on_plateau"), REFUSED
            ),
            **dict.fromkeys(("cosine_with_min_lr", "warmup_stable_decay", "greedy"), REFUSED),
        },
        why="schedules are constant, linear, cosine and wsd; min_lr_ratio and lr_wsd_* shape them",
    ),
    "lr_scheduler_kwargs": absent("min_lr_ratio and the lr_wsd_* keys shape schedules"),
    "warmup_steps": reckoned(f"{_OPTIM}.lr_warmup_steps or lr_warmup_steps_ratio", "below 1 it is a share"),
    "optim": to(
        f"{_OPTIM}.optimizer",
        {
            **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
            **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw_8bit"),
            **dict.fromkeys(
                ("sgd", "adafactor", "paged_adamw_8bit", "paged_adamw_32bit", "lion_32bit"), REFUSED
            ),
        },
        why="optimizers are AdamW, with 8-bit state or in host memory, and Muon",
    ),
    **dict.fromkeys(("optim_args", "optim_target_modules"), absent("optimizers have keys of their own")),
    "num_train_epochs": reckoned("trainer.total_epochs", "whole passes over the data"),
    "max_steps": reckoned("trainer.total_training_steps", _STEPS),
    **dict.fromkeys(("save_strategy", "save_steps"), reckoned("trainer.save_freq", _STEPS)),
    **dict.fromkeys(("eval_strategy", "eval_steps", "do_eval"), reckoned("trainer.test_freq", _STEPS)),
    "save_total_limit": to("trainer.max_ckpt_to_keep"),
    "eval_on_start": to("trainer.val_before_train"),
    "eval_delay": absent("validation begins with the first step that trainer.test_freq divides"),
    "seed": to("trainer.seed"),
    "data_seed": to("data.seed"),
    "full_determinism": to(f"{_FSDP}.full_determinism"),
    "output_dir": to("trainer.default_local_dir"),
    "project": to("trainer.project_name"),
    "run_name": to("trainer.experiment_name"),
    "report_to": reckoned("trainer.logger", "the console beside them"),
    "use_cpu": to("trainer.device", {True: "cpu", False: "auto"}),
    "gradient_checkpointing": to(f"{_MODEL}.enable_gradient_checkpointing"),
    "gradient_checkpointing_kwargs": nothing("recomputation is PyTorch's without re-entry"),
    "use_liger_kernel": to(f"{_MODEL}.use_liger", {False: None}),
    "liger_kernel_config": absent("Liger's layers are switched as a whole by use_liger"),
    "torch_compile": to(f"{_FSDP}.use_torch_compile"),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), absent("layers go through Inductor")),
    "bf16": reckoned(f"{_FSDP}.dtype", "computes in bf16 unless fp16 or bf16=False is set"),
    "fp16": absent("fp16 is not offered; bf16 needs no loss scale"),
    "tf32": absent("fp32 products are fp32"),
    "resume_from_checkpoint": reckoned(
        "trainer.resume_mode", "true is auto, a path goes to resume_from_path"
    ),
    "load_best_model_at_end": absent(
        "trainer.keep_best keeps the best checkpoint, `tandem export --best` takes it"
    ),
    "metric_for_best_model": to("trainer.keep_best"),
    "greater_is_better": to("trainer.keep_best_mode", {True: "max", False: "min"}),
    "logging_steps": _LOGS,
    **dict.fromkeys(("logging_first_step", "logging_strategy", "logging_nan_inf_filter", "log_level"), _LOGS),
    **dict.fromkeys(("log_level_replica", "log_on_each_node", "disable_tqdm", "skip_memory_metrics"), _LOGS),
    "include_num_input_tokens_seen": _LOGS,
    **dict.fromkeys(
        ("hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy"), _HUB
    ),
    **dict.fromkeys(("hub_token", "push_to_hub"), _HUB),
    **dict.fromkeys(
        ("trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
        absent("trackio keeps its files here"),
    ),
    **dict.fromkeys(("ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_static_graph"), _DDP),
    "ddp_find_unused_parameters": _DDP,
    "ddp_timeout": to("trainer.timeouts.collective", why="seconds"),
    **dict.fromkeys(
        ("fsdp", "fsdp_config", "deepspeed", "accelerator_config", "parallelism_config"), _SHARDED
    ),
    **dict.fromkeys(
        ("dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context"),
        nothing(_LOADING),
    ),
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory"),
        nothing(_LOADING),
    ),
    **dict.fromkeys(
        ("dataloader_prefetch_factor", "remove_unused_columns", "length_column_name"), nothing(_LOADING)
    ),
    "ignore_data_skip": absent("a resumed run goes on at the row where it stood"),
    "train_sampling_strategy": absent("data.sampler takes an order of one's own"),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches"), _EVAL
    ),
    **dict.fromkeys(
        ("eval_use_gather_object", "batch_eval_metrics", "include_for_metrics", "label_names"), _EVAL
    ),
    **dict.fromkeys(
        ("prediction_loss_only", "do_predict", "do_train", "bf16_full_eval", "fp16_full_eval"), _EVAL
    ),
    "auto_find_batch_size": absent(
        "use_dynamic_bsz fills micro-batches by tokens; `tandem plan` predicts memory"
    ),
    "average_tokens_across_devices": nothing("losses are normalised over the global mini-batch always"),
    "label_smoothing_factor": absent("labels are not smoothed"),
    "neftune_noise_alpha": absent("embeddings get no noise"),
    "torch_empty_cache_steps": nothing("memory is handed back between phases where roles share a device"),
    "use_cache": nothing("training keeps no cache of keys and values"),
    "save_on_each_node": nothing("a checkpoint is written once, by all ranks together"),
    "save_only_model": absent(
        "checkpoints hold all that an exact resume needs; `tandem export` writes the model"
    ),
    "enable_jit_checkpoint": nothing("SIGTERM saves and ends a run"),
    "restore_callback_states_from_checkpoint": nothing("there are no callbacks"),
    "debug": nothing("`tandem check --run` and the report of a failed worker take its place"),
    "local_rank": nothing("each rank is told its place by the controller"),
}

_ONLINE: dict[str, Verdict] = {
    "model_init_kwargs": absent(
        "keys of actor_rollout_ref.model set what is offered, as attn_implementation"
    ),
    "trust_remote_code": to(f"{_MODEL}.trust_remote_code"),
    "router_aux_loss_coef": absent("mixtures of experts are trained without an auxiliary loss"),
    "disable_dropout": absent("models are trained with the dropout of their config.json; set it to 0 there"),
    "num_generations": to(f"{_ROLLOUT}.n"),
    "num_generations_eval": to(f"{_ROLLOUT}.val_kwargs.n"),
    "max_completion_length": to("data.max_response_length"),
    "ds3_gather_for_generation": nothing("there is no DeepSpeed"),
    "shuffle_dataset": to("data.shuffle"),
    "pad_to_multiple_of": _PACKED,
    **dict.fromkeys(
        ("generation_batch_size", "steps_per_generation"), reckoned("data.train_batch_size", _SIZES)
    ),
    "temperature": to(f"{_ROLLOUT}.temperature"),
    "top_p": to(f"{_ROLLOUT}.top_p"),
    "top_k": to(f"{_ROLLOUT}.top_k", {0: -1}),
    "min_p": to(f"{_ROLLOUT}.min_p"),
    "repetition_penalty": to(f"{_ROLLOUT}.repetition_penalty"),
    "generation_kwargs": absent(
        "keys of actor_rollout_ref.rollout set what is offered, as stop and min_tokens"
    ),
    "chat_template_kwargs": to("data.apply_chat_template_kwargs"),
    "cache_implementation": nothing("the rollout engine has a paged cache"),
    "use_vllm": to(f"{_ROLLOUT}.name", {True: "vllm", False: "native"}),
    "vllm_mode": reckoned(f"{_ROLLOUT}.mode", "colocate or server, with use_vllm"),
    "vllm_model_impl": absent("vLLM chooses its own model code"),
    "vllm_enable_sleep_mode": nothing("engines free their cache beside training, rollout.free_cache_engine"),
    "vllm_structured_outputs_regex": absent("sampling is not constrained"),
    **dict.fromkeys(
        ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_group_port"), _SERVER
    ),
    "vllm_server_timeout": _SERVER,
    **dict.fromkeys(
        ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length"),
        reckoned(
            f"{_ROLLOUT}.gpu_memory_utilization, tensor_model_parallel_size, max_model_len",
            "with use_vllm, colocated",
        ),
    ),
    "beta": reckoned(
        f"{_ACTOR}.use_kl_loss, kl_loss_coef, or algorithm.kl_ctrl.kl_coef", "0 needs no reference"
    ),
    "num_iterations": to(f"{_ACTOR}.ppo_epochs"),
    **dict.fromkeys(
        ("epsilon", "epsilon_high"),
        reckoned(
            f"{_ACTOR}.clip_ratio_low, clip_ratio_high",
            "of cispo epsilon_high is the bound itself, here how far it is above 1",
        ),
    ),
    "reward_weights": reckoned(
        "algorithm.gdpo_reward_weights",
        "with normalize_then_sum; a sum of weighted rewards belongs into the reward function",
    ),
    "mask_truncated_completions": to("algorithm.mask_truncated_completions"),
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        reckoned(
            "actor_rollout_ref.ref.reset_interval",
            "the reference becomes the policy, mixup_alpha=1; other mixtures are not offered",
        ),
    ),
    **dict.fromkeys(
        ("log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts"), _SAMPLES
    ),
    **dict.fromkeys(
        ("use_transformers_continuous_batching", "use_transformers_paged"),
        nothing("the native engine batches continuously"),
    ),
    "transformers_continuous_batching_config": nothing("keys of actor_rollout_ref.rollout size the engine"),
}

GRPO: dict[str, Verdict] = {
    **_TRAINING,
    **_ONLINE,
    "cast_lm_head_to_fp32": absent("the head's products are in the compute type, its sums in fp32"),
    "delta": reckoned(f"{_ACTOR}.clip_ratio_c", "dual clipping; unset, a bound out of reach"),
    "sapo_temperature_neg": to(f"{_ACTOR}.tau_neg"),
    "sapo_temperature_pos": to(f"{_ACTOR}.tau_pos"),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), _VESPO),
    "importance_sampling_level": reckoned(f"{_ACTOR}.policy_loss.loss_mode", "sequence is gspo"),
    "multi_objective_aggregation": reckoned("algorithm.adv_estimator", "normalize_then_sum is gdpo"),
    "scale_rewards": reckoned("algorithm.adv_estimator", "group is grpo, none is dr_grpo"),
    "loss_type": reckoned(
        f"{_ACTOR}.policy_loss.loss_mode, loss_agg_mode",
        "dapo and bnpo: token-mean; grpo and sapo: seq-mean-token-mean; dr_grpo: seq-mean-token-sum-norm",
    ),
    "top_entropy_quantile": absent("all tokens of responses count"),
    "entropy_coef": to(f"{_ACTOR}.entropy_coeff"),
    "use_adaptive_entropy": to(f"{_ADAPTIVE}.enabled"),
    **{
        name: reckoned(f"{_ADAPTIVE}.{key}", "with use_adaptive_entropy")
        for name, key in {
            "entropy_coef_min": "min_ent_coef",
            "entropy_coef_max": "max_ent_coef",
            "entropy_coef_delta": "delta_ent_coef",
            "entropy_target": "target_entropy",
        }.items()
    },
    "max_tool_calling_iterations": absent("there are no tools in training"),
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        reckoned(f"{_CORRECTION}.rollout_is", "with use_vllm"),
    ),
    **dict.fromkeys(
        ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
        reckoned(f"{_CORRECTION}.rollout_is_threshold", "with use_vllm; masks are two bounds"),
    ),
    "vllm_importance_sampling_cap": absent("an older name of vllm_importance_sampling_clip_max"),
    "off_policy_mask_threshold": absent(
        "rollout_correction.rollout_rs rejects sequences by other statistics"
    ),
    "use_bias_correction_kl": absent("the KL loss is not weighed by the ratio"),
    "log_completions_hub_repo": _HUB,
}

RLOO: dict[str, Verdict] = {
    **_TRAINING,
    **_ONLINE,
    "normalize_advantages": absent("advantages of rloo are in units of the reward"),
    "reward_clip_range": absent("clip the reward in the reward function"),
}

_OFFLINE: dict[str, Verdict] = {
    **_TRAINING,
    "per_device_train_batch_size": reckoned(
        "data.train_batch_size, micro_batch_size_per_gpu", "times accumulation and devices"
    ),
    "gradient_accumulation_steps": reckoned("data.train_batch_size", "times rows per device and devices"),
    "per_device_eval_batch_size": nothing("validation fills micro-batches as training does"),
    "model_init_kwargs": _ONLINE["model_init_kwargs"],
    "trust_remote_code": _ONLINE["trust_remote_code"],
    "chat_template_path": absent(f"{_MODEL}.custom_chat_template takes the template's text"),
    "dataset_num_proc": nothing(_LOADING),
    "eos_token": absent("the tokenizer's own ends a sequence"),
    "pad_token": _PACKED,
    "max_length": to("data.max_length"),
    "pad_to_multiple_of": _PACKED,
    "activation_offloading": to(f"{_MODEL}.enable_activation_offload"),
}

SFT: dict[str, Verdict] = {
    **_OFFLINE,
    "router_aux_loss_coef": _ONLINE["router_aux_loss_coef"],
    "dataset_text_field": absent(
        "rows are messages, or prompts and responses: data.messages_key, data.prompt_key"
    ),
    "dataset_kwargs": absent("rows are messages, or prompts and responses"),
    "truncation_mode": to("data.truncation", {"keep_start": "right", "keep_end": "left"}),
    "shuffle_dataset": to("data.shuffle"),
    **dict.fromkeys(("packing", "packing_strategy", "padding_free", "eval_packing"), _PACKED),
    "completion_only_loss": absent("the loss is on responses, or on the assistant's messages"),
    "assistant_only_loss": nothing("the loss is on the assistant's messages"),
    "loss_type": to(
        "", {"nll": None, "dft": REFUSED, "chunked_nll": None}, why="the loss is the log-likelihood"
    ),
}

REWARD: dict[str, Verdict] = {
    **_OFFLINE,
    "disable_dropout": _ONLINE["disable_dropout"],
    "center_rewards_coefficient": to("center_rewards_coefficient"),
}

MODEL: dict[str, Verdict] = {
    "model_name_or_path": to(f"{_MODEL}.path", why="a local folder"),
    "model_revision": to("", {"main": None}, why="a model is a local folder"),
    "dtype": to(
        f"{_FSDP}.model_dtype", {"float32": "fp32", "bfloat16": "bf16", "auto": None, "float16": REFUSED}
    ),
    "attn_implementation": to(f"{_MODEL}.attn_implementation", {"eager": REFUSED, "sdpa": "torch"}),
    "use_peft": reckoned(f"{_MODEL}.lora_rank", "with lora_r"),
    **dict.fromkeys(
        ("lora_r", "lora_alpha", "lora_target_modules"),
        reckoned(f"{_MODEL}.lora_rank, lora_alpha, target_modules", "with use_peft"),
    ),
    "lora_dropout": absent("adapters are trained without dropout"),
    **dict.fromkeys(
        ("lora_target_parameters", "lora_modules_to_save"), absent("adapters are on linear layers")
    ),
    "lora_task_type": nothing("adapters are those of the trainer's model"),
    **dict.fromkeys(("use_rslora", "use_dora"), absent("adapters are plain LoRA")),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit"), _BNB),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
        nothing("weights are not quantised"),
    ),
}

SCRIPT: dict[str, Verdict] = {
    "dataset_name": reckoned("data.train_files", "a parquet file with the columns that `tandem train` reads"),
    "dataset_config": absent("data are parquet files"),
    **dict.fromkeys(
        ("dataset_train_split", "dataset_test_split"),
        reckoned("data.train_files, data.val_files", "a file for each"),
    ),
    "dataset_streaming": nothing("data are parquet files"),
    "ignore_bias_buffers": _DDP,
    "reward_model_name_or_path": to("reward_model.model.path"),
    "reward_funcs": reckoned("custom_reward_function.path, name", "one function for one response"),
}

TABLES = {"GRPOConfig": GRPO, "RLOOConfig": RLOO, "SFTConfig": SFT, "RewardConfig": REWARD}
"""By class of TRL's that a trainer takes."""
