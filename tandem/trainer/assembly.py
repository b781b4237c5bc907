"""From a config to a trainer that can run, from top to bottom: check, open the run folder, reserve places,
read the data, plan, start the groups, put the trainer together. What can be refused is refused before
anything costlier is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from tandem.algorithms.entropy import AdaptiveEntropyController
from tandem.algorithms.kl import AdaptiveKLController, FixedKLController, kl_controller
from tandem.config.actor import ActorConfig
from tandem.config.root import TrainConfig
from tandem.config.schema import keys, value_at
from tandem.config.supervised import RMConfig, SFTConfig, SupervisedConfig
from tandem.config.trainer import TrainerConfig
from tandem.hub import fetch_weights
from tandem.loading import load_function
from tandem.models.ends import stop_token_ids
from tandem.models.loading import lacks_score_head, load_config
from tandem.models.vocabulary import tokenizer_of
from tandem.observability.stacks import withdraw_stacks
from tandem.rewards import Scorer, own_reward
from tandem.rewards.combination import combination_of
from tandem.runtime import Backend, ResourcePool, Worker, WorkerGroup
from tandem.runtime.worker import WorkerFactory
from tandem.trainer.beforehand import plan_of, task_of
from tandem.trainer.checks import check_algorithms, models_of, say_idle_offload
from tandem.trainer.gathering import Evaluator, Gathered, Gatherer
from tandem.trainer.integrity import Facts
from tandem.trainer.launch import Launcher, Recipe, make_backend, plain_errors, recipes
from tandem.trainer.loop import Listener, Rhythm
from tandem.trainer.placing import CONTROLLER_POOL, Cast, cast_roles, configured_placement, pools_of, tenants
from tandem.trainer.planning import predicted, run_worst_batches, tell_plan
from tandem.trainer.ppo import PPOTrainer
from tandem.trainer.prompts import Prompts
from tandem.trainer.sampling_params import sampling
from tandem.trainer.schedule import Schedule
from tandem.trainer.scoring import Scoring
from tandem.trainer.session import OpenRun, RunsConfig, Session, open_run
from tandem.trainer.steps import Plan
from tandem.trainer.supervised import SupervisedTrainer
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
    listeners: Sequence[Listener] = (),
) -> PPOTrainer:
    """The trainer of a resolved config. Its workers run until its `shutdown`; where this raises, they
    have been ended.

    Args:
        trainer: its class.
        schedule: see `Loop`.
        listeners: called with each step that is done, after the config's own.

    Raises:
        TandemError: the config asks for what is not there: a device, files, an algorithm, a logger.
    """
    policy = config.actor_rollout_ref
    spec = check_algorithms(config)
    cast = cast_roles(config, spec)
    placed = tenants(configured_placement(config.trainer), cast)
    say_idle_offload(config.trainer, models_of(config, cast.played), say)
    reward = own_reward(config.custom_reward_function, config.reward.timeout)
    combination = combination_of(config)
    tokenizer = tokenizer_of(policy.model, "actor_rollout_ref.model")
    with _opened(config, say) as (run, backend):
        backend.reserve(list(pools_of(placed).values()))
        reads = {} if reward is None else {"reads": reward.reads}
        reader = partial(placed["data"].worker, config.data, tokenizer, run.folder, **reads)
        data, facts = _data(backend, reader)
        plan = plan_of(config, spec, facts, reward, scores="reward" in cast.played, say=say)
        memory = _say_beginning(config, run, facts.rows, plan, say, backend.gpus)
        stops = stop_token_ids(policy.model.path, tokenizer)
        made_with = recipes(config, plan, tokenizer, reward, run.folder, stops)
        launcher = _launcher(config, cast, plan, made_with, backend, reward, Scoring(combination))
        roles = launcher.launch(placed, data)
        run_worst_batches(config, roles)
        made = trainer(
            plan,
            _rhythm(config.trainer, plan.total_steps),
            Session(run, roles.members, plan.total_steps, say),
            launcher,
            roles,
            _gatherer(config, data, facts, stops),
            _evaluator(config, facts.val_batches, stops),
            _kl_controller(config),
            _entropy_controller(policy.actor),
            schedule,
            Facts.of(config, plan),
            memory,
        )
        made.listeners += [*_own_listener(config.trainer.on_step), *listeners]
        return made


def _launcher(
    config: TrainConfig,
    cast: Cast,
    plan: Plan,
    made_with: Mapping[str, Recipe],
    backend: Backend,
    reward: Scorer | None,
    scoring: Scoring,
) -> Launcher:
    """
    Args:
        made_with: see `recipes`.
        reward: the user's own; None takes each data source's.
    """
    return Launcher(
        cast,
        plan,
        made_with,
        backend,
        balance=config.trainer.balance_batch,
        scoring=scoring,
        scores_parts=reward is None or not reward.batched,
    )


def build_sft(config: SFTConfig, *, say: Say) -> SupervisedTrainer:
    """The trainer of a supervised fine-tuning; see `build_supervised`."""
    return build_supervised(config, say=say)


def build_rm(config: RMConfig, *, say: Say) -> SupervisedTrainer:
    """The trainer of a reward model; see `build_supervised`. A language model gets a new score head, and the
    user is told."""
    model = config.model
    stored = load_config(model.path, trust_remote_code=model.trust_remote_code)
    if lacks_score_head(stored):
        say(f"{model.path} is a language model: its score head is new, drawn by trainer.seed.")
    return build_supervised(config, say=say)


def build_supervised(config: SupervisedConfig, *, say: Say) -> SupervisedTrainer:
    """The trainer of a resolved config. Its workers run until its `shutdown`; where this raises, they
    have been ended.

    Raises:
        TandemError: the config asks for what is not there: a device, files, a logger.
    """
    trainer, task = config.trainer, task_of(config)
    say_idle_offload(trainer, {"": config}, say)
    tokenizer = tokenizer_of(config.model)
    with _opened(config, say) as (run, backend):
        ((name, counts),) = trainer.pools.items()
        pool = ResourcePool(counts, name)
        backend.reserve([CONTROLLER_POOL, pool])

        examples: type[Worker] = ExamplesWorker
        read = partial(task.dataset, tokenizer=tokenizer)
        data, facts = _data(backend, partial(examples, config.data, read, run.folder))
        order = config.data
        prompts = Prompts(data, facts, order.train_batch_size, shuffle=order.shuffle, seed=order.seed)

        steps = trainer.steps(prompts.steps_per_epoch)
        say(run.beginning(config.model.path, facts.rows, f"{order.train_batch_size} rows", steps))
        worker: type[Worker] = SupervisedWorker
        factory = partial(
            worker, config, role=task.role, kind=task.kind, loss=task.loss, total_steps=steps, run=run.folder
        )
        model = WorkerGroup(backend, factory, pool, role=task.role, balance=trainer.balance_batch)

        return SupervisedTrainer(
            Rhythm(steps, trainer.test_freq, trainer.save_freq),
            prompts,
            Session(run, {task.role: model}, steps, say),
            backend,
            name=task.name,
            data=data,
            model=model,
            val_batches=facts.val_batches,
        )


@contextmanager
def _opened(config: RunsConfig, say: Say) -> Iterator[tuple[OpenRun, Backend]]:
    """A run folder and the backend of its workers; where the block raises, both are undone. Models of the hub
    have their weights then."""
    for name in keys(type(config)):
        if name.endswith("model.path") and (folder := value_at(config, name)):
            fetch_weights(folder)
        elif name.endswith((".ref.models", "reward_model.models")):
            for term in value_at(config, name).values():
                if term.path:
                    fetch_weights(term.path)
    run = open_run(config, say)
    with ExitStack() as undo, plain_errors():
        undo.callback(run.folder.remove_if_unused)
        undo.callback(run.lock.release)
        undo.callback(withdraw_stacks, run.folder.logs)
        backend = make_backend(config.trainer, run.names[1], run.folder, say)
        undo.callback(backend.shutdown)
        yield run, backend
        undo.pop_all()


def _say_beginning(
    config: TrainConfig, run: OpenRun, rows: int, plan: Plan, say: Say, gpus: bool | None
) -> dict[str, float]:
    """What is about to run, and the memory that it will take.

    Returns:
        the bytes that each phase is predicted to hold.
    """
    what = f"{config.data.train_batch_size} prompts × {plan.at(1).n} responses"
    say(run.beginning(config.actor_rollout_ref.model.path, rows, what, plan.total_steps))
    return predicted(tell_plan(config, say, gpus))


def _own_listener(on_step: str | None) -> Iterator[Listener]:
    if on_step is not None:
        function = load_function(on_step)
        yield lambda step: function(step.number, step.metrics)


def _data(backend: Backend, reader: WorkerFactory) -> tuple[WorkerGroup, DataFacts]:
    """The group that reads the data, and what it found there.

    Raises:
        DataError: anything wrong with them.
    """
    data = WorkerGroup(backend, reader, CONTROLLER_POOL, role="data")
    return data, data.describe()


def _gatherer(config: TrainConfig, data: WorkerGroup, facts: DataFacts, stops: tuple[int, ...]) -> Gatherer:
    """What answers the prompts of each step, which come in generation batches.

    Raises:
        DataError: too few rows for such a batch.
    """
    order, drawn = config.data, config.data.sampler.class_name is not None
    prompts = Prompts(
        data,
        facts,
        order.prompts_at_a_time,
        shuffle=order.shuffle,
        seed=order.seed,
        mixture=order.mixture,
        drawn=drawn,
    )
    return Gatherer(
        config.algorithm.filter_groups,
        config.reward_model.overlong_buffer,
        prompts,
        sampling(config, stops),
        size=order.train_batch_size,
        leaves_out_failed=config.leaves_out_failed,
    )


def _rhythm(run: TrainerConfig, steps: int) -> Rhythm:
    return Rhythm(steps, run.test_freq, run.save_freq, run.val_before_train, run.val_only, run.samples_freq)


def _evaluator(config: TrainConfig, batches: int, stops: tuple[int, ...]) -> Evaluator | None:
    """Validation over so many batches; None where there are none."""
    params = sampling(config, stops, validation=True)
    n, run = config.actor_rollout_ref.rollout.val_kwargs.n, config.trainer
    shown = run.log_val_generations
    return Evaluator(batches, n, params, run.samples_freq > 0 or shown > 0, shown) if batches else None


def _kl_controller(config: TrainConfig) -> FixedKLController | AdaptiveKLController:
    """Moves the coefficient of the KL in the reward."""
    kl = config.algorithm.kl_ctrl
    return kl_controller(kl.type, kl.kl_coef, kl.target_kl, kl.horizon)


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
