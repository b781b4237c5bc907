"""The names of config keys in other programs: transformers' Trainer, TRL, OpenRLHF, prime-rl."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.config.section import nearest_remedy

_ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("learning_rate actor_learning_rate base_lr", ("optim.lr",)),
    ("critic_learning_rate", ("critic.optim.lr",)),
    ("warmup_ratio lr_warmup_ratio", ("optim.lr_warmup_steps_ratio",)),
    ("warmup_steps num_warmup_steps", ("optim.lr_warmup_steps",)),
    ("lr_scheduler scheduler", ("optim.lr_scheduler_type",)),
    ("max_grad_norm max_norm gradient_clipping", ("optim.clip_grad",)),
    ("adam_beta1 adam_beta2 adam_betas betas1 betas2", ("optim.betas",)),
    ("adam_epsilon", ("optim.eps",)),
    ("l2", ("optim.weight_decay",)),
    ("optim", ("optim.optimizer",)),
    ("num_train_epochs num_epochs max_epochs num_episodes epochs", ("trainer.total_epochs",)),
    ("max_steps num_steps", ("trainer.total_training_steps",)),
    (
        "per_device_train_batch_size micro_train_batch_size micro_batch_size",
        ("actor.ppo_micro_batch_size_per_gpu", "micro_batch_size_per_gpu"),
    ),
    ("batch_size rollout_batch_size generation_batch_size", ("data.train_batch_size",)),
    ("num_generations n_samples_per_prompt rollouts_per_example group_size rloo_k", ("rollout.n",)),
    (
        "max_completion_length generate_max_len max_new_tokens max_tokens response_length",
        ("data.max_response_length",),
    ),
    ("prompt_max_len", ("data.max_prompt_length",)),
    ("max_seq_length max_seq_len max_len seq_len", ("data.max_length", "data.max_prompt_length")),
    ("beta kl_coef init_kl_coef kl_beta", ("actor.kl_loss_coef",)),
    ("epsilon eps_clip cliprange clip_eps", ("actor.clip_ratio",)),
    ("epsilon_low eps_clip_low", ("actor.clip_ratio_low",)),
    ("epsilon_high eps_clip_high", ("actor.clip_ratio_high",)),
    ("delta dual_clip", ("actor.clip_ratio_c",)),
    ("num_iterations num_ppo_epochs", ("actor.ppo_epochs",)),
    ("entropy_coef entropy_loss_coef", ("actor.entropy_coeff",)),
    ("advantage_estimator", ("algorithm.adv_estimator",)),
    ("loss_type", ("policy_loss.loss_mode",)),
    ("lambd", ("algorithm.lam",)),
    ("output_dir save_path ckpt_path", ("trainer.default_local_dir",)),
    ("save_steps", ("trainer.save_freq",)),
    ("eval_steps", ("trainer.test_freq",)),
    ("eval_on_start", ("trainer.val_before_train",)),
    ("save_total_limit max_ckpt_num", ("trainer.max_ckpt_to_keep",)),
    ("resume_from_checkpoint load_checkpoint", ("trainer.resume_mode",)),
    ("report_to use_wandb use_tensorboard", ("trainer.logger",)),
    ("run_name wandb_run_name", ("trainer.experiment_name",)),
    ("wandb_project", ("trainer.project_name",)),
    ("actor_num_gpus_per_node num_gpus", ("trainer.n_gpus_per_node",)),
    ("model_name_or_path pretrain model_name", ("actor_rollout_ref.model.path", "model.path")),
    ("gradient_checkpointing", ("model.enable_gradient_checkpointing",)),
    ("attn_impl attn", ("model.attn_implementation",)),
    ("lora_r", ("model.lora_rank",)),
    ("lora_target_modules", ("model.target_modules",)),
    ("lora_target_parameters", ("model.target_parameters",)),
    ("data_seed", ("data.seed",)),
    ("train_dataset dataset_name prompt_data dataset", ("data.train_files",)),
    ("eval_dataset", ("data.val_files",)),
    ("input_key", ("data.prompt_key",)),
    ("output_key", ("data.response_key",)),
    ("label_key", ("data.answer_key",)),
    ("reward_funcs remote_rm_url", ("custom_reward_function.path",)),
    ("packing", ("use_dynamic_bsz",)),
)
OTHER_NAMES = {name: ends for names, ends in _ROWS for name in names.split()}
"""A dict from a key's name in another program to the suffixes of Tandem's keys with this meaning."""


def meant_elsewhere(name: str, known: Iterable[str]) -> str | None:
    """Return a sentence with the Tandem key for another program's key name; None if no key fits.

    Args:
        name: the dotted path that was given.
        known: the existing keys, the most likely first.
    """
    parent, _, leaf = name.rpartition(".")
    ends = OTHER_NAMES.get(leaf.lower().replace("-", "_"), ())
    meant = [key for key in known if any(key == end or key.endswith(f".{end}") for end in ends)]
    role = parent.partition(".")[0]
    own = [key for key in meant if key.startswith(f"{role}.")] or meant
    return nearest_remedy(own[0], own) if own else None
