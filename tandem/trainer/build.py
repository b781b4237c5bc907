"""From a config to a trainer that can run: what can be refused without a model is refused
before one is loaded, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from tandem.algorithms.kl import AdaptiveKLController, FixedKLController
from tandem.algorithms.registry import advantage_estimator, policy_loss
from tandem.config.algorithm import KLControllerConfig
from tandem.config.fsdp import FSDPConfig
from tandem.config.load import to_dict, to_yaml
from tandem.config.root import TrainConfig
from tandem.config.unused import uses_critic
from tandem.data.loader import BatchLoader, all_batches
from tandem.data.prompts import PromptDataset
from tandem.device import choose_device
from tandem.models.loading import load_tokenizer
from tandem.observability.run import RunFolder
from tandem.observability.sinks.base import RunInfo
from tandem.protocol import SamplingParams
from tandem.rewards import Reward, load_custom, reward_for
from tandem.runtime import LocalBackend, ResourcePool, WorkerGroup
from tandem.trainer.evaluate import Evaluator
from tandem.trainer.ppo import PPOTrainer, Roles
from tandem.trainer.session import Session, open_run
from tandem.trainer.steps import Plan, plan_run, updates_per_step
from tandem.workers.actor import ActorWorker
from tandem.workers.batch import BatchWorker
from tandem.workers.critic import CriticWorker
from tandem.workers.reward import RewardWorker


def build_ppo(config: TrainConfig, *, say: Callable[[str], None]) -> PPOTrainer:
    """The trainer of a resolved config.

    Args:
        say: prints a sentence to the user.

    Raises:
        TandemError: the config asks for what is not there: a device, files, an algorithm, a logger.
    """
    device = choose_device(config.trainer.device)
    say_unused_offload(_sharded(config), device, say)
    spec = advantage_estimator(config.algorithm.adv_estimator)
    spec.select_options({}, config.algorithm.adv_kwargs)  # refuses what does not fit
    own_loss = config.actor_rollout_ref.actor.policy_loss
    policy_loss(own_loss.loss_mode).select_options({}, own_loss.kwargs)
    reward = _reward(config)
    tokenizer = _tokenizer(config)
    dataset = _dataset(config, tokenizer, config.data.train_files, config.data.train_max_samples)
    loader = BatchLoader(
        dataset, config.data.train_batch_size, shuffle=config.data.shuffle, seed=config.data.seed
    )
    validation = (
        _dataset(config, tokenizer, config.data.val_files, config.data.val_max_samples)
        if config.data.val_files
        else None
    )
    if reward is None:
        for source in {*dataset.data_sources, *(validation.data_sources if validation else ())}:
            reward_for(source)
    plan = plan_run(config, spec, loader.steps_per_epoch)
    run = open_run(config.trainer, to_yaml(config), say)
    roles = _roles(config, plan, run.folder, tokenizer, reward, device)
    session = Session(
        run,
        config.trainer.logger,
        RunInfo(
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name,
            folder=run.folder.path,
            total_steps=plan.total_steps,
            config=to_dict(config),
        ),
        {"actor": roles.actor} | ({"critic": roles.critic} if roles.critic else {}),
        samples_freq=config.trainer.samples_freq,
        say=say,
    )
    stops = stop_token_ids(config.actor_rollout_ref.model.path, tokenizer)
    return PPOTrainer(
        config,
        plan,
        roles,
        _sampling(config, stops, validation=False),
        loader,
        _evaluator(config, roles, session, validation, stops) if validation else None,
        _kl_controller(config.algorithm.kl_ctrl),
        session,
    )


def say_unused_offload(
    configs: Mapping[str, FSDPConfig], device: torch.device, say: Callable[[str], None]
) -> None:
    """Tells the user of offload that there is nothing to gain from.

    Args:
        configs: the sections of the models that run, by dotted path.
    """
    names = [
        f"{at}.{part}"
        for at, config in configs.items()
        for part in ("param_offload", "optimizer_offload")
        if getattr(config, part)
    ]
    if names and device.type == "cpu":
        say(f"{', '.join(names)}: no effect on a CPU, whose memory is the host's.")


def _sharded(config: TrainConfig) -> dict[str, FSDPConfig]:
    """The sections of the models that this run has."""
    policy = config.actor_rollout_ref
    sections = {"actor_rollout_ref.actor.fsdp_config": policy.actor.fsdp_config}
    if config.needs_reference:
        sections["actor_rollout_ref.ref.fsdp_config"] = policy.ref.fsdp_config
    if uses_critic(config):
        sections["critic.fsdp_config"] = config.critic.fsdp_config
    return sections


def _tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        model.tokenizer_path,
        custom_chat_template=model.custom_chat_template,
        trust_remote_code=model.trust_remote_code,
    )


def _reward(config: TrainConfig) -> Reward | None:
    custom = config.custom_reward_function
    return None if custom.path is None else load_custom(custom.path, custom.name, custom.reward_kwargs)


def _dataset(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, files: tuple[str, ...], max_samples: int
) -> PromptDataset:
    data = config.data
    return PromptDataset(
        list(files),
        tokenizer,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        max_samples=max_samples,
        chat_template_kwargs=data.apply_chat_template_kwargs,
    )


def _roles(
    config: TrainConfig,
    plan: Plan,
    run: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
    reward: Reward | None,
    device: torch.device,
) -> Roles:
    backend, pool = LocalBackend(), ResourcePool([1])
    actor = WorkerGroup(
        backend,
        ActorWorker,
        pool,
        config,
        tokenizer=tokenizer,
        total_steps=max(1, plan.total_steps - config.trainer.critic_warmup),
        updates_per_step=updates_per_step(plan.batch_samples, plan.actor),
        device=device,
        run=run,
        recompute_old=plan.recompute_old,
        with_reference=plan.use_reference,
    )
    critic = (
        WorkerGroup(
            backend,
            CriticWorker,
            pool,
            config.critic,
            norm_length=config.actor_rollout_ref.actor.loss_scale_factor,
            total_steps=plan.total_steps,
            updates_per_step=updates_per_step(plan.batch_samples, plan.critic),
            device=device,
            run=run,
        )
        if plan.use_critic
        else None
    )
    return Roles(
        actor=actor,
        reference=actor if plan.use_reference else None,
        critic=critic,
        reward=WorkerGroup(backend, RewardWorker, pool, tokenizer, reward),
        batch=WorkerGroup(backend, BatchWorker, pool, config.algorithm, run),
    )


def _evaluator(
    config: TrainConfig,
    roles: Roles,
    session: Session,
    dataset: PromptDataset,
    stops: tuple[int, ...],
) -> Evaluator:
    return Evaluator(
        lambda: all_batches(dataset, config.data.val_batch_size),
        actor=roles.actor,
        reward=roles.reward,
        batch=roles.batch,
        n=config.actor_rollout_ref.rollout.val_kwargs.n,
        params=_sampling(config, stops, validation=True),
        writes_samples=config.trainer.samples_freq > 0,
    )


def _sampling(config: TrainConfig, stops: tuple[int, ...], *, validation: bool) -> SamplingParams:
    rollout = config.actor_rollout_ref.rollout
    settings = rollout.val_kwargs if validation else rollout
    greedy = validation and not rollout.val_kwargs.do_sample
    return SamplingParams(
        temperature=0.0 if greedy else settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        max_tokens=config.data.max_response_length,
        stop_token_ids=stops,
        stop=tuple(rollout.stop),
        seed=config.trainer.seed,
    )


def stop_token_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokenizer's end of sequence and those of the model's generation config."""
    ids = {tokenizer.eos_token_id}
    if (Path(model_path) / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(model_path).eos_token_id
        ids |= set(declared) if isinstance(declared, list) else {declared}
    return tuple(sorted(token for token in ids if token is not None))


def _kl_controller(config: KLControllerConfig) -> FixedKLController | AdaptiveKLController:
    if config.type == "fixed":
        return FixedKLController(config.kl_coef)
    return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
