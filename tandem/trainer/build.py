"""From a config to a trainer that can run: what can be refused without a model is refused
before one is loaded, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from transformers import PreTrainedTokenizerBase

from tandem.algorithms.entropy import AdaptiveEntropyController
from tandem.algorithms.kl import FULL, AdaptiveKLController, FixedKLController
from tandem.algorithms.registry import AdvantageSpec, advantage_estimator, kl_estimator, policy_loss
from tandem.config.actor import ActorConfig
from tandem.config.algorithm import KLControllerConfig
from tandem.config.data import DataConfig
from tandem.config.fsdp import FSDPConfig
from tandem.config.load import to_dict, to_yaml
from tandem.config.optim import OptimConfig
from tandem.config.root import TrainConfig
from tandem.data.loader import BatchOrder
from tandem.device import choose_device
from tandem.errors import ConfigError
from tandem.models.loading import load_tokenizer
from tandem.observability.sinks.base import RunInfo
from tandem.observability.stacks import withdraw_stacks
from tandem.rewards import Reward, load_custom, reward_for
from tandem.runtime import WorkerGroup
from tandem.trainer.evaluate import Evaluator
from tandem.trainer.gathering import require_sampling
from tandem.trainer.launch import Launcher, make_backend, plain_errors
from tandem.trainer.placing import configured_placement, load_classes, tenants
from tandem.trainer.ppo import PPOTrainer
from tandem.trainer.prompts import Prompts
from tandem.trainer.reference import further_methods
from tandem.trainer.roles import Roles
from tandem.trainer.sampling import sampling, stop_token_ids
from tandem.trainer.session import OpenRun, Session, open_run
from tandem.trainer.steps import Plan, plan_run, played_roles
from tandem.workers.correction import Correction
from tandem.workers.data import DataFacts


def build_ppo(
    config: TrainConfig, *, say: Callable[[str], None], trainer: type[PPOTrainer] = PPOTrainer
) -> PPOTrainer:
    """The trainer of a resolved config. Its workers run until its `shutdown`; where this raises, they
    have been ended.

    Args:
        say: prints a sentence to the user.
        trainer: its class.

    Raises:
        TandemError: the config asks for what is not there: a device, files, an algorithm, a logger.
    """
    spec = _checked(config, say)
    reward = _reward(config)
    tokenizer = _tokenizer(config)
    run = open_run(config.trainer, to_yaml(config), say)
    with ExitStack() as undo, plain_errors():
        undo.callback(run.folder.remove_if_unused)
        undo.callback(withdraw_stacks, run.folder.logs)
        backend = make_backend(config.trainer, run.folder, say)
        undo.callback(backend.shutdown)
        launcher = Launcher(config, played_roles(config, spec), backend, run.folder, tokenizer, reward)
        placement = configured_placement(config)
        launcher.reserve(placement)
        data = launcher.launch_data()
        facts: DataFacts = data.describe()
        if reward is None and not config.reward_model.enable:
            for source in facts.sources:
                reward_for(source)
        prompts, steps_per_epoch = _prompts(config.data, data, facts.rows)
        plan = plan_run(config, spec, steps_per_epoch)
        roles = launcher.launch(placement, plan, data)
        require_sampling(config, roles.batch, data)
        stops = stop_token_ids(config.actor_rollout_ref.model.path, tokenizer)
        made = trainer(
            config,
            plan,
            launcher,
            roles,
            sampling(config, stops),
            prompts,
            _evaluator(config, facts, stops),
            _kl_controller(config.algorithm.kl_ctrl),
            _entropy_controller(config.actor_rollout_ref.actor),
            _session(config, run, roles, plan, say),
        )
        undo.pop_all()
    return made


def _checked(config: TrainConfig, say: Callable[[str], None]) -> AdvantageSpec:
    """The advantage estimator, once everything has been looked at that needs no file of data."""
    trainer = config.trainer
    on_cpu = trainer.device == "cpu"  # elsewhere workers may be on machines that have what this one lacks
    if trainer.resolved_backend == "local":
        on_cpu = choose_device(trainer.device).type == "cpu"
    spec = advantage_estimator(config.algorithm.adv_estimator)
    played = played_roles(config, spec)
    say_unused_offload(_sharded(config, played), _optimizers(config, played), on_cpu, say)
    if on_cpu:
        _say_counted_offload(config, played, say)
    spec.select_options({}, config.algorithm.adv_kwargs)  # refuses what does not fit
    _check_rewards(config, spec)
    own_loss = config.actor_rollout_ref.actor.policy_loss
    policy_loss(own_loss.loss_mode).select_options({}, own_loss.kwargs)
    Correction.from_config(config.algorithm.rollout_correction)
    classes = load_classes(trainer.worker_classes)
    tenants(configured_placement(config), played, classes, further_methods(config, spec))
    for kind in _kl_kinds(config) - {FULL}:
        kl_estimator(kind.removesuffix("+"))
    return spec


def _check_rewards(config: TrainConfig, spec: AdvantageSpec) -> None:
    """
    Raises:
        ConfigError: the reward is to be changed, and the estimator does not read it.
    """
    if "token_level_rewards" in spec.columns:
        return
    for field, changes in (
        ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward),
        ("reward_model.overlong_buffer.enable", config.reward_model.overlong_buffer.enable),
    ):
        if changes:
            raise ConfigError(
                f"changes the rewards, which {spec.name} does not read",
                field=field,
                got="true",
                expected="false",
                remedy="return the penalty as a component of the reward, or choose another "
                "algorithm.adv_estimator",
            )


def _kl_kinds(config: TrainConfig) -> set[str]:
    """The KL estimators that the run uses."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    in_reward = {algorithm.kl_penalty} if algorithm.use_kl_in_reward else set()
    return in_reward | ({actor.kl_loss_type} if actor.use_kl_loss else set())


def say_unused_offload(
    configs: Mapping[str, FSDPConfig],
    optimizers: Mapping[str, OptimConfig],
    on_cpu: bool,
    say: Callable[[str], None],
) -> None:
    """Tells the user of offload that there is nothing to gain from.

    Args:
        configs: the sections of the models that run, by dotted path.
        optimizers: of those that learn.
    """
    names = [
        f"{at}.{part}"
        for at, config in configs.items()
        for part in ("param_offload", "optimizer_offload")
        if getattr(config, part)
    ]
    names += [f"{at}.optimizer=adamw_cpu" for at, o in optimizers.items() if o.optimizer == "adamw_cpu"]
    if names and on_cpu:
        say(f"{', '.join(names)}: no effect on a CPU, whose memory is the host's.")


def _say_counted_offload(config: TrainConfig, played: frozenset[str], say: Callable[[str], None]) -> None:
    """Tells the user of a CPU that activations stay where they are."""
    models = {
        "actor": ("actor_rollout_ref.model", config.actor_rollout_ref.model),
        "critic": ("critic.model", config.critic.model),
    }
    for role, (at, model) in models.items():
        if role in played and model.enable_activation_offload:
            say(f"{at}.enable_activation_offload: on a CPU nothing moves; what would is counted.")


def _sharded(config: TrainConfig, played: frozenset[str]) -> dict[str, FSDPConfig]:
    """The sections of the models that this run has."""
    policy = config.actor_rollout_ref
    sections = {
        "actor": ("actor_rollout_ref.actor", policy.actor.fsdp_config),
        "ref": ("actor_rollout_ref.ref", policy.ref.fsdp_config),
        "critic": ("critic", config.critic.fsdp_config),
        "reward_model": ("reward_model", config.reward_model.fsdp_config),
    }
    return {f"{at}.fsdp_config": section for role, (at, section) in sections.items() if role in played}


def _optimizers(config: TrainConfig, played: frozenset[str]) -> dict[str, OptimConfig]:
    """The sections of the models that learn."""
    sections = {
        "actor": ("actor_rollout_ref.actor.optim", config.actor_rollout_ref.actor.optim),
        "critic": ("critic.optim", config.critic.optim),
    }
    return {at: section for role, (at, section) in sections.items() if role in played}


def _reward(config: TrainConfig) -> Reward | None:
    custom = config.custom_reward_function
    return None if custom.path is None else load_custom(custom.path, custom.name, custom.reward_kwargs)


def _tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        model.tokenizer_path,
        custom_chat_template=model.custom_chat_template,
        trust_remote_code=model.trust_remote_code,
    )


def _prompts(config: DataConfig, data: WorkerGroup, rows: int) -> tuple[Prompts, int]:
    """The prompts, in generation batches, and the steps of an epoch in which all of them are learnt from.

    Raises:
        DataError: too few rows for a batch of either kind.
    """
    shuffle, seed = config.shuffle, config.seed
    steps_per_epoch = BatchOrder(rows, config.train_batch_size, shuffle=shuffle, seed=seed).steps_per_epoch
    drawn = config.sampler.class_name is not None
    return Prompts(
        data, rows, config.prompts_at_a_time, shuffle=shuffle, seed=seed, drawn=drawn
    ), steps_per_epoch


def _evaluator(config: TrainConfig, facts: DataFacts, stops: tuple[int, ...]) -> Evaluator | None:
    if not facts.val_batches:
        return None
    return Evaluator(
        facts.val_batches,
        n=config.actor_rollout_ref.rollout.val_kwargs.n,
        params=sampling(config, stops, validation=True),
        writes_samples=config.trainer.samples_freq > 0,
    )


def _kl_controller(config: KLControllerConfig) -> FixedKLController | AdaptiveKLController:
    if config.type == "fixed":
        return FixedKLController(config.kl_coef)
    return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)


def _entropy_controller(config: ActorConfig) -> AdaptiveEntropyController | None:
    """What moves the entropy's coefficient, if anything does."""
    settings = config.adaptive_entropy
    if not settings.enabled:
        return None
    return AdaptiveEntropyController(
        config.entropy_coeff,
        target=settings.target_entropy,
        delta=settings.delta_ent_coef,
        minimum=settings.min_ent_coef,
        maximum=settings.max_ent_coef,
    )


def _session(
    config: TrainConfig, run: OpenRun, roles: Roles, plan: Plan, say: Callable[[str], None]
) -> Session:
    trainer = config.trainer
    return Session(
        run,
        trainer.logger,
        RunInfo(
            project=trainer.project_name,
            experiment=trainer.experiment_name,
            folder=run.folder.path,
            total_steps=plan.total_steps,
            config=to_dict(config),
        ),
        roles.members,
        samples_freq=trainer.samples_freq,
        say=say,
    )
