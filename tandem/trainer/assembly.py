"""From a config to a trainer that can run, from top to bottom: check, open the run folder, reserve places,
read the data, plan, start the groups, put the trainer together. What can be refused is refused before
anything costlier is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from transformers import PreTrainedTokenizerBase

from tandem.algorithms.entropy import AdaptiveEntropyController
from tandem.algorithms.kl import AdaptiveKLController, FixedKLController
from tandem.config.actor import ActorConfig
from tandem.config.algorithm import KLControllerConfig
from tandem.config.data import DataConfig
from tandem.config.load import to_dict
from tandem.config.model import ModelConfig
from tandem.config.rewards import CustomRewardConfig
from tandem.config.root import TrainConfig
from tandem.config.supervised import RMConfig, SFTConfig, SupervisedConfig
from tandem.data.loader import BatchOrder
from tandem.models.loading import lacks_score_head, load_config, load_tokenizer
from tandem.observability.sinks.base import RunInfo
from tandem.observability.stacks import withdraw_stacks
from tandem.rewards import Reward, load_custom, reward_for
from tandem.runtime import Backend, ResourcePool, Worker, WorkerGroup
from tandem.trainer.checks import check_algorithms, on_cpu, say_idle_offload, say_unused_offload
from tandem.trainer.gathering import Evaluator, Gathered
from tandem.trainer.launch import Launcher, make_backend, plain_errors
from tandem.trainer.loop import Rhythm
from tandem.trainer.placing import CONTROLLER_POOL, cast_roles, configured_placement, tenants
from tandem.trainer.ppo import PPOTrainer
from tandem.trainer.prompts import Prompts
from tandem.trainer.sampling_params import sampling, stop_token_ids
from tandem.trainer.saving import Saves
from tandem.trainer.schedule import Schedule
from tandem.trainer.session import OpenRun, RunsConfig, Session, open_run
from tandem.trainer.steps import plan_run
from tandem.trainer.supervised import SupervisedTrainer, Task, rm_task, sft_task
from tandem.workers.data import DataFacts, ExamplesWorker
from tandem.workers.supervised import SupervisedWorker

Say = Callable[[str], None]
"""Prints a sentence to the user."""


def build_ppo(
    config: TrainConfig,
    *,
    say: Say,
    trainer: type[PPOTrainer] = PPOTrainer,
    schedule: Schedule[Gathered] | None = None,
) -> PPOTrainer:
    """The trainer of a resolved config. Its workers run until its `shutdown`; where this raises, they
    have been ended.

    Args:
        trainer: its class.
        schedule: see `Loop`.

    Raises:
        TandemError: the config asks for what is not there: a device, files, an algorithm, a logger.
    """
    on_host = on_cpu(config.trainer)
    spec = check_algorithms(config)
    cast = cast_roles(config, spec)
    placed = tenants(configured_placement(config.trainer), cast)
    if on_host:
        say_idle_offload(config, cast.played, say)
    reward = _own_reward(config.custom_reward_function)
    tokenizer = _tokenizer(config.actor_rollout_ref.model)
    with _opened(config, say) as (run, backend):
        launcher = Launcher(config, cast, backend, run.folder, tokenizer, reward)
        launcher.reserve(placed)

        data = launcher.launch_data(placed["data"])
        facts: DataFacts = data.describe()
        if "reward" in cast.played and reward is None:
            for source in facts.sources:
                reward_for(source)
        prompts, steps_per_epoch = _prompts(config.data, data, facts.rows)

        plan = plan_run(config, spec, steps_per_epoch)
        roles = launcher.launch(placed, plan, data)

        stops = stop_token_ids(config.actor_rollout_ref.model.path, tokenizer)
        return trainer(
            config,
            plan,
            launcher,
            roles,
            sampling(config, stops),
            prompts,
            _evaluator(config, facts.val_batches, stops),
            _kl_controller(config.algorithm.kl_ctrl),
            _entropy_controller(config.actor_rollout_ref.actor),
            _session(run, config, roles.members, plan.total_steps, say),
            schedule,
        )


def build_sft(config: SFTConfig, *, say: Say) -> SupervisedTrainer:
    """The trainer of a supervised fine-tuning; see `build_supervised`."""
    return build_supervised(config, sft_task(config), say=say)


def build_rm(config: RMConfig, *, say: Say) -> SupervisedTrainer:
    """The trainer of a reward model; see `build_supervised`. A language model gets a new score head, and the
    user is told."""
    model = config.model
    if lacks_score_head(load_config(model.path, trust_remote_code=model.trust_remote_code)):
        say(f"{model.path} is a language model: its score head is new, drawn by trainer.seed.")
    return build_supervised(config, rm_task(config), say=say)


def build_supervised(config: SupervisedConfig, task: Task, *, say: Say) -> SupervisedTrainer:
    """The trainer of a resolved config. Its workers run until its `shutdown`; where this raises, they
    have been ended.

    Raises:
        TandemError: the config asks for what is not there: a device, files, a logger.
    """
    trainer = config.trainer
    if on_cpu(trainer):
        say_unused_offload({"fsdp_config": config.fsdp_config}, {"optim": config.optim}, say)
    tokenizer = _tokenizer(config.model)
    with _opened(config, say) as (run, backend):
        ((name, counts),) = trainer.pools.items()
        pool = ResourcePool(counts, name)
        backend.reserve([CONTROLLER_POOL, pool])

        examples: type[Worker] = ExamplesWorker
        read = partial(task.dataset, tokenizer=tokenizer)
        data = WorkerGroup(
            backend, partial(examples, config.data, read, run.folder), CONTROLLER_POOL, role="data"
        )
        facts: DataFacts = data.describe()
        order = config.data
        prompts = Prompts(data, facts.rows, order.train_batch_size, shuffle=order.shuffle, seed=order.seed)

        steps = trainer.total_training_steps or trainer.total_epochs * prompts.steps_per_epoch
        worker: type[Worker] = SupervisedWorker
        factory = partial(
            worker, config, role=task.role, kind=task.kind, loss=task.loss, total_steps=steps, run=run.folder
        )
        model = WorkerGroup(backend, factory, pool, role=task.role, balance=trainer.balance_batch)

        return SupervisedTrainer(
            Rhythm(steps, trainer.test_freq, trainer.save_freq),
            prompts,
            _session(run, config, {task.role: model}, steps, say),
            backend,
            name=task.name,
            data=data,
            model=model,
            val_batches=facts.val_batches,
        )


@contextmanager
def _opened(config: RunsConfig, say: Say) -> Iterator[tuple[OpenRun, Backend]]:
    """A run folder and the backend of its workers; where the block raises, both are undone."""
    run = open_run(config, say)
    with ExitStack() as undo, plain_errors():
        undo.callback(run.folder.remove_if_unused)
        undo.callback(run.lock.release)
        undo.callback(withdraw_stacks, run.folder.logs)
        backend = make_backend(config.trainer, run.folder, say)
        undo.callback(backend.shutdown)
        yield run, backend
        undo.pop_all()


def _own_reward(custom: CustomRewardConfig) -> Reward | None:
    """The user's own reward function; None where the data sources' own ones score."""
    return None if custom.path is None else load_custom(custom.path, custom.name, custom.reward_kwargs)


def _tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
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


def _evaluator(config: TrainConfig, batches: int, stops: tuple[int, ...]) -> Evaluator | None:
    """Validation over so many batches; None where there are none."""
    params = sampling(config, stops, validation=True)
    n, writes = config.actor_rollout_ref.rollout.val_kwargs.n, config.trainer.samples_freq > 0
    return Evaluator(batches, n, params, writes) if batches else None


def _kl_controller(config: KLControllerConfig) -> FixedKLController | AdaptiveKLController:
    if config.type == "fixed":
        return FixedKLController(config.kl_coef)
    return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)


def _entropy_controller(config: ActorConfig) -> AdaptiveEntropyController | None:
    """Moves the coefficient of the entropy bonus by each step's entropy; None where it is fixed."""
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
    run: OpenRun,
    config: TrainConfig | SupervisedConfig,
    members: Mapping[str, Saves],
    total_steps: int,
    say: Say,
) -> Session:
    info = RunInfo(
        project=run.config.project_name,
        experiment=run.config.experiment_name,
        folder=run.folder.path,
        total_steps=total_steps,
        config=to_dict(config),
    )
    freq = config.trainer.samples_freq if isinstance(config, TrainConfig) else -1
    return Session(run, run.config.logger, info, members, samples_freq=freq, say=say)
