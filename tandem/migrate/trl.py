"""Convert TRL's settings to a config of Tandem, including keys that depend on several settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.section import Section
from tandem.config.supervised import RMConfig, SFTConfig
from tandem.errors import ConfigError
from tandem.migrate.peer import Peer
from tandem.migrate.trl_table import FIELDS, MODEL, OLDER, OLDER_NAMES, SCRIPT, TABLES
from tandem.peers.table import Reading

COMMANDS: dict[str, tuple[str, type[Section]]] = {
    "GRPOConfig": ("train", TrainConfig),
    "RLOOConfig": ("train", TrainConfig),
    "SFTConfig": ("sft", SFTConfig),
    "RewardConfig": ("rm", RMConfig),
}
"""A dict from a config class of TRL to Tandem's command and config class."""

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_CORRECTION = "algorithm.rollout_correction"
_UNBOUNDED = 1e9
_AGGREGATION = {
    **dict.fromkeys(("grpo", "sapo"), "seq-mean-token-mean"),
    **dict.fromkeys(("dapo", "bnpo", "cispo"), "token-mean"),
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}


def migrate(
    name: str, given: Mapping[str, Any], *, devices: int, implied: Mapping[str, Any] | None = None
) -> Peer:
    """Return the config for TRL's settings.

    Args:
        name: TRL's class: GRPOConfig, RLOOConfig, SFTConfig or RewardConfig.
        given: the fields of this class, of ModelConfig and of the script's arguments.
        devices: the number of processes that TRL runs on.
        implied: fields that the user did not write, with values that follow from other code of the user.

    Raises:
        ConfigError: the batch sizes would split a group of completions.
    """
    command, root = COMMANDS[name]
    table = {**SCRIPT, **MODEL, **TABLES[name], **(OLDER if command == "train" else {})}
    defaults = {**FIELDS["ScriptArguments"], **FIELDS["ModelConfig"], **FIELDS[name], **(implied or {})}
    both = {old: now for old, now in OLDER_NAMES.items() if old in given and now in table}
    older = {now: old for old, now in both.items() if not given.get(now)}
    renamed = {now: given[old] for now, old in older.items()}
    own = {name: value for name, value in given.items() if name not in both}
    peer = Peer(command, root, table, defaults, own | renamed)
    peer.take(str if command == "train" else _offline)
    if command == "train":
        _sizes(peer, devices)
    else:
        _offline_sizes(peer, devices)
    _run(peer)
    _optimizer(peer, "" if command != "train" else f"{_ACTOR}.")
    _model(peer, "model" if command != "train" else _MODEL)
    if command == "train":
        _rollout(peer)
        _kl(peer, name)
        _loss(peer, name)
        _correction(peer, name)
        _reward(peer)
    _data(peer)
    peer.rows = [replace(row, name=older.get(row.name, row.name)) for row in peer.rows]
    peer.rows += [
        Reading(old, given[old], "ignored", f"{now} is set and replaces it")
        for old, now in both.items()
        if now not in older
    ]
    return peer


def _offline(key: str) -> str:
    """Convert a config key of `tandem train` to the matching key of `tandem sft` and `tandem rm`."""
    return key.removeprefix(f"{_ACTOR}.").replace(_MODEL, "model")


def _sizes(peer: Peer, devices: int) -> None:
    """Set the batch sizes and the keys that count steps.

    TRL's batch sizes count completions. Tandem's batch sizes count prompts.
    """
    rows, accumulated, n = (
        peer["per_device_train_batch_size"],
        peer["gradient_accumulation_steps"],
        peer["num_generations"],
    )
    updated = rows * accumulated * devices
    steps = peer["steps_per_generation"] or accumulated
    generated = peer["generation_batch_size"] or rows * steps * devices
    for what, size in (("a generation", generated), ("an optimizer step", updated)):
        if size % n:
            raise ConfigError(
                f"{what} has {size} completions, which is not a multiple of the group size {n}",
                field="per_device_train_batch_size",
                got=f"{rows} per device, {devices} devices, {accumulated} accumulated",
                expected=f"a multiple of num_generations={n}",
                remedy="an update needs whole groups; change one of these numbers, or set --devices",
            )
    if generated % updated:
        raise ConfigError(
            "a generation is not a whole number of optimizer steps",
            field="steps_per_generation",
            got=f"{generated} completions, {updated} per step",
        )
    updates = generated // updated * peer["num_iterations"]
    peer.put("data.train_batch_size", generated // n, always=True)
    peer.put(f"{_ACTOR}.ppo_mini_batch_size", updated // n, always=True)
    peer.put(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", rows, always=True)
    peer.put("trainer.n_gpus_per_node", devices)
    _steps(peer, updates)
    limit = peer["max_prompt_length"]
    if limit is not None:
        peer.put("data.truncation", "left")
    peer.notes += [
        f"data.train_batch_size: {generated} completions per generation / {n} per prompt = "
        f"{generated // n} prompts.",
        f"ppo_mini_batch_size: {rows} per device x {accumulated} accumulated x {devices} devices = {updated} "
        f"completions / {n} = {updated // n} prompts.",
        f"A training step contains {updates} of TRL's optimizer steps, so save_steps, eval_steps, max_steps "
        f"and warmup_steps are divided by {updates}.",
    ]
    if limit is None:
        peer.notes.append(
            "data.max_prompt_length: TRL has no such limit. Longer prompts are an error unless "
            "data.truncation or data.filter_overlong_prompts is set."
        )


def _offline_sizes(peer: Peer, devices: int) -> None:
    rows, accumulated = peer["per_device_train_batch_size"], peer["gradient_accumulation_steps"]
    peer.put("data.train_batch_size", rows * accumulated * devices, always=True)
    peer.put("micro_batch_size_per_gpu", rows, always=True)
    peer.put("use_dynamic_bsz", False)
    peer.put("trainer.n_gpus_per_node", devices)
    _steps(peer, 1)
    peer.notes.append(
        f"data.train_batch_size: {rows} per device x {accumulated} accumulated x {devices} devices = "
        f"{rows * accumulated * devices} rows."
    )


def _steps(peer: Peer, updates: int) -> None:
    peer.put("trainer.total_epochs", max(1, round(peer["num_train_epochs"])), always=True)
    if peer["max_steps"] > 0:
        peer.put("trainer.total_training_steps", max(1, peer["max_steps"] // updates))
    for strategy, every, key in (
        ("save_strategy", "save_steps", "trainer.save_freq"),
        ("eval_strategy", "eval_steps", "trainer.test_freq"),
    ):
        if peer[strategy] in ("epoch", "best"):
            peer.refuse(strategy, f"{key} is a number of steps")
        elif peer[strategy] == "steps":
            count = peer[every] or peer["logging_steps"]
            peer.put(key, max(1, int(count) // updates) if count >= 1 else -1)
    warmup = peer["warmup_steps"] or 0
    at = f"{_ACTOR}.optim" if peer.root is TrainConfig else "optim"
    if 0 < warmup < 1:
        peer.put(f"{at}.lr_warmup_steps_ratio", float(warmup))
    elif warmup >= 1:
        peer.put(f"{at}.lr_warmup_steps", max(1, int(warmup) // updates))


def _run(peer: Peer) -> None:
    """Set the keys for resuming and for loggers."""
    resumed = peer["resume_from_checkpoint"]
    if isinstance(resumed, str):
        peer.put("trainer.resume_mode", "resume_path")
        peer.put("trainer.resume_from_path", resumed)
    elif resumed is None and "trainer.default_local_dir" in peer.config:
        peer.put("trainer.resume_mode", "disable")
    loggers = peer["report_to"] or "none"
    names = [loggers] if isinstance(loggers, str) else list(loggers)
    if "all" in names:
        peer.refuse("report_to", "list the loggers in trainer.logger")
    elif names != ["none"]:
        peer.put("trainer.logger", ["console", *names])


def _optimizer(peer: Peer, at: str) -> None:
    peer.put(f"{at}optim.betas", [peer["adam_beta1"], peer["adam_beta2"]])
    if peer["bf16"] is not False and not peer["fp16"]:
        peer.put(f"{at}fsdp_config.dtype", "bf16", always="bf16" in peer.given)


def _model(peer: Peer, at: str) -> None:
    if not peer["use_peft"]:
        return
    peer.put(f"{at}.lora_rank", peer["lora_r"])
    peer.put(f"{at}.lora_alpha", peer["lora_alpha"])
    for name in ("target_modules", "target_parameters"):
        if peer[f"lora_{name}"]:
            peer.put(f"{at}.{name}", peer[f"lora_{name}"])
    if peer["lora_dropout"]:
        peer.refuse("lora_dropout", "adapters are trained without dropout")


def _rollout(peer: Peer) -> None:
    if peer["use_vllm"]:
        if peer["vllm_mode"] == "server":
            peer.put(f"{_ROLLOUT}.mode", "server")
        else:
            peer.put(f"{_ROLLOUT}.gpu_memory_utilization", peer["vllm_gpu_memory_utilization"])
            peer.put(f"{_ROLLOUT}.tensor_model_parallel_size", peer["vllm_tensor_parallel_size"])
            if peer["vllm_max_model_length"]:
                peer.put(f"{_ROLLOUT}.max_model_len", peer["vllm_max_model_length"])
    if peer["eval_strategy"] == "steps":
        peer.put(f"{_ROLLOUT}.val_kwargs.do_sample", True)
        peer.put(f"{_ROLLOUT}.val_kwargs.temperature", peer["temperature"])
        peer.put(f"{_ROLLOUT}.val_kwargs.n", peer["num_generations_eval"] or peer["num_generations"])


def _kl(peer: Peer, name: str) -> None:
    if not peer["beta"]:
        return
    if name == "RLOOConfig":
        peer.put("algorithm.use_kl_in_reward", True)
        peer.put("algorithm.kl_ctrl.kl_coef", peer["beta"])
    else:
        peer.put(f"{_ACTOR}.use_kl_loss", True)
        peer.put(f"{_ACTOR}.kl_loss_coef", peer["beta"])
        if peer["use_bias_correction_kl"]:
            peer.refuse(
                "use_bias_correction_kl",
                "the KL loss is not weighted by the ratio; its gradient is that of k3",
            )
    if peer["sync_ref_model"]:
        if peer["ref_model_mixup_alpha"] == 1:
            peer.put("actor_rollout_ref.ref.reset_interval", peer["ref_model_sync_steps"])
        else:
            peer.refuse(
                "sync_ref_model",
                "the reference can only be replaced completely, as ref_model_mixup_alpha=1 does",
            )


def _loss(peer: Peer, name: str) -> None:
    low, high = peer["epsilon"], peer["epsilon_high"]
    if name == "RLOOConfig":
        peer.put("algorithm.adv_estimator", "rloo")
        peer.put(f"{_ACTOR}.loss_agg_mode", "seq-mean-token-sum")
        if f"{_ACTOR}.ppo_epochs" in peer.config:
            peer.refuse("num_iterations", "ratios are clipped per token; TRL clips the ratio of the sequence")
    else:
        _estimator(peer)
        _grpo_loss(peer)
        if peer["loss_type"] == "cispo":
            low, high = 1.0, (high if high is not None else low) - 1
    peer.put(f"{_ACTOR}.clip_ratio", peer["epsilon"])
    if low != peer["epsilon"]:
        peer.put(f"{_ACTOR}.clip_ratio_low", low)
    if high is not None:
        peer.put(f"{_ACTOR}.clip_ratio_high", high)
    if f"{_ACTOR}.policy_loss.loss_mode" not in peer.config:
        peer.put(f"{_ACTOR}.clip_ratio_c", peer["delta"] or _UNBOUNDED)


def _grpo_loss(peer: Peer) -> None:
    loss = peer["loss_type"]
    if loss not in _AGGREGATION:
        peer.refuse("loss_type", f"the {loss} loss is not supported")
        return
    peer.put(f"{_ACTOR}.loss_agg_mode", _AGGREGATION[loss])
    if peer["importance_sampling_level"] == "sequence":
        if loss in ("cispo", "sapo"):
            peer.refuse("importance_sampling_level", f"{loss} only has weights per token")
        else:
            peer.put(f"{_ACTOR}.policy_loss.loss_mode", "gspo")
    elif loss in ("cispo", "sapo"):
        peer.put(f"{_ACTOR}.policy_loss.loss_mode", loss)
    if peer["use_adaptive_entropy"]:
        for name, key in (("min", "min_ent_coef"), ("max", "max_ent_coef"), ("delta", "delta_ent_coef")):
            peer.put(f"{_ACTOR}.adaptive_entropy.{key}", peer[f"entropy_coef_{name}"])
        peer.put(f"{_ACTOR}.adaptive_entropy.target_entropy", peer["entropy_target"])


def _estimator(peer: Peer) -> None:
    scaled = peer["scale_rewards"]
    if peer["multi_objective_aggregation"] == "normalize_then_sum":
        peer.put("algorithm.adv_estimator", "gdpo")
        if peer["reward_weights"]:
            peer.put("algorithm.gdpo_reward_weights", peer["reward_weights"])
    elif scaled in ("none", False):
        peer.put("algorithm.adv_estimator", "dr_grpo")
    else:
        peer.put("algorithm.adv_estimator", "grpo")
        peer.put("algorithm.adv_kwargs", {"epsilon": 1e-4})
        if scaled == "batch":
            peer.refuse(
                "scale_rewards", "advantages are divided by the group's standard deviation or not at all"
            )


def _correction(peer: Peer, name: str) -> None:
    if name != "GRPOConfig" or not peer["use_vllm"] or not peer["vllm_importance_sampling_correction"]:
        return
    level, _, how = peer["vllm_importance_sampling_mode"].partition("_")
    low, high = peer["vllm_importance_sampling_clip_min"], peer["vllm_importance_sampling_clip_max"]
    if how == "truncate" and low:
        peer.refuse("vllm_importance_sampling_clip_min", "weights are only limited from above")
    if high is None:
        high = _UNBOUNDED
    peer.put(f"{_CORRECTION}.rollout_is", level)
    smallest = low or 1e-9
    peer.put(
        f"{_CORRECTION}.rollout_is_threshold",
        f"{float(smallest)}_{float(high)}" if how == "mask" else str(float(high)),
    )


def _reward(peer: Peer) -> None:
    functions = peer["reward_funcs"]
    names = [functions] if isinstance(functions, str) else list(functions or [])
    if peer["reward_model_name_or_path"]:
        peer.put("reward_model.enable", True)
        return
    peer.put("custom_reward_function.path", "reward.py")
    if len(names) == 1 and names[0].isidentifier():
        peer.put("custom_reward_function.name", names[0])
    peer.notes.append(
        f"custom_reward_function: {', '.join(names) or 'the reward functions'} score lists of completions. "
        "Here, a function compute_score(data_source, solution_str, ground_truth, extra_info) scores one "
        "response; to use several functions, let it return their weighted sum. Without this key, the "
        "built-in function of the row's data_source scores responses."
    )


def _data(peer: Peer) -> None:
    peer.put("data.train_files", "train.parquet", always=True)
    if peer["eval_strategy"] != "no":
        peer.put("data.val_files", "test.parquet", always=True)
    path = f"{_MODEL if peer.root is TrainConfig else 'model'}.path"
    if path not in peer.config:
        peer.put(path, "model", always=True)
        peer.notes.append(f"{path}: set it to the local folder of the model.")
    dataset = peer["dataset_name"]
    peer.notes.append(f"data.train_files: convert {dataset or 'the dataset'} to a Parquet file.")
