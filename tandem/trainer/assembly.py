"""Build, from a config, a trainer that is ready to run.

The order is: check the config, open the run folder, reserve processes, read the data, plan the run, start the
worker groups, create the trainer. A config that cannot run is refused as early as possible, before any slower
work starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from tandem.config.data import DataConfig
from tandem.config.facts import engines, models
from tandem.config.root import TrainConfig
from tandem.config.supervised import RMConfig, SupervisedConfig
from tandem.loading import load_function
from tandem.models.loading import lacks_score_head, load_config
from tandem.models.resized import complete_weights
from tandem.models.vocabulary import tokenizer_of
from tandem.observability.stacks import withdraw_stacks
from tandem.runtime import Backend, ResourcePool, Worker, WorkerGroup
from tandem.trainer.beforehand import prepare, say_idle_offload, task_of
from tandem.trainer.casting import CONTROLLER_POOL, pools_of
from tandem.trainer.gathering import Evaluator, Gathered, Gatherer
from tandem.trainer.launch import Launcher, make_backend, plain_errors
from tandem.trainer.loop import Listener, Rhythm, Schedule
from tandem.trainer.planning import predicted, run_worst_batches, tell_plan
from tandem.trainer.ppo import PPOTrainer
from tandem.trainer.prompts import Prompts
from tandem.trainer.sampling_params import sampling
from tandem.trainer.scoring import Scoring
from tandem.trainer.session import OpenRun, RunsConfig, Session, open_run
from tandem.trainer.supervised import SupervisedTrainer
from tandem.workers.data import DataFacts, DatasetWorker, Read, read_examples
from tandem.workers.supervised import SupervisedWorker

Say = Callable[[str], None]
"""A function that prints a sentence for the user."""


def build_ppo(
    config: TrainConfig,
    *,
    say: Say,
    trainer: type[PPOTrainer] = PPOTrainer,
    schedule: Schedule[Gathered] | None = None,
    listeners: Sequence[Listener] = (),
    data: Callable[[], Read] | None = None,
) -> PPOTrainer:
    """Build the reinforcement learning trainer of a resolved config.

    The workers run until you call the trainer's `shutdown`. If this function raises, it has stopped them.

    Args:
        config: The resolved config.
        say: Prints a sentence for the user.
        trainer: The trainer class.
        schedule: Decides when the run generates responses and when it learns; see `Schedule`.
        listeners: Functions that are called after each step, after the config's own `trainer.on_step`.
        data: A function that reads the rows; None: the files that the config names are read.

    Raises:
        TandemError: A device, file, algorithm or logger in the config does not exist on this machine.
    """
    prepared = prepare(config)
    say_idle_offload(config.trainer, prepared.engines, say)
    with _opened(config, say) as (run, backend):
        backend.reserve(list(pools_of(prepared.placed).values()))
        if data is None:
            own = prepared.placed["data"].worker
            rows, facts = _data(backend, own, config.data, prepared.tokenizer, run.folder, **prepared.reads)
        else:
            rows, facts = _data(backend, DatasetWorker, data, run.folder)
        plan = prepared.plan(facts, say)
        asked = f"{config.data.train_batch_size} prompts × {plan.at(1).n} responses"
        say(run.beginning(config.actor_rollout_ref.model.path, facts.rows, asked, plan.total_steps))
        memory = predicted(tell_plan(config, say, backend.gpus))
        launcher = Launcher(prepared, plan, backend, run.folder)
        roles = launcher.launch(prepared.placed, rows, Scoring(prepared.combination))
        run_worst_batches(config, roles)
        made = trainer(
            config,
            plan,
            Session(run, roles.members, plan.total_steps, say),
            launcher,
            roles,
            Gatherer(config, _prompts(config.data, rows, facts), sampling(config, prepared.stops)),
            _evaluator(config, facts.val_batches, prepared.stops),
            schedule,
            memory,
        )
        if config.trainer.on_step is not None:
            on_step = load_function(config.trainer.on_step)
            made.listeners.append(lambda step: on_step(step.number, step.metrics))
        made.listeners += listeners
        return made


def build_supervised(config: SupervisedConfig, *, say: Say) -> SupervisedTrainer:
    """Build the supervised trainer of a resolved config, for fine-tuning (SFT) or for a reward model.

    A language model that becomes a reward model gets a new score head, and a message tells the user. The
    workers run until you call the trainer's `shutdown`. If this function raises, it has stopped them.

    Args:
        config: The resolved config.
        say: Prints a sentence for the user.

    Raises:
        TandemError: A device, file or logger in the config does not exist on this machine.
    """
    model = config.model
    if isinstance(config, RMConfig) and lacks_score_head(
        load_config(model.path, trust_remote_code=model.trust_remote_code)
    ):
        say(f"{model.path} is a language model: its score head is new and random (seed: trainer.seed).")
    trainer, task = config.trainer, task_of(config)
    say_idle_offload(trainer, list(engines(config).values()), say)
    tokenizer = tokenizer_of(model)
    with _opened(config, say) as (run, backend):
        ((name, counts),) = trainer.pools.items()
        pool = ResourcePool(counts, name)
        backend.reserve([CONTROLLER_POOL, pool])

        read = partial(read_examples, config.data, partial(task.dataset, tokenizer=tokenizer))
        data, facts = _data(backend, DatasetWorker, read, run.folder)
        order = config.data
        prompts = Prompts(data, facts, order.train_batch_size, shuffle=order.shuffle, seed=order.seed)

        steps = trainer.steps(prompts.steps_per_epoch)
        say(run.beginning(model.path, facts.rows, f"{order.train_batch_size} rows", steps))
        worker: type[Worker] = SupervisedWorker
        factory = partial(
            worker, config, role=task.role, kind=task.kind, loss=task.loss, total_steps=steps, run=run.folder
        )
        group = WorkerGroup(backend, factory, pool, role=task.role, balance=trainer.balance_batch)

        return SupervisedTrainer(
            Rhythm(steps, trainer.test_freq, trainer.save_freq),
            prompts,
            Session(run, {task.role: group}, steps, say),
            backend,
            name=task.name,
            data=data,
            model=group,
            val_batches=facts.val_batches,
        )


@contextmanager
def _opened(config: RunsConfig, say: Say) -> Iterator[tuple[OpenRun, Backend]]:
    """Yield a run folder and the backend of its workers; if the block raises an error, release both.

    Weights on the hub are downloaded first, and resized embeddings are written.
    """
    for model in models(config):
        complete_weights(model.path, trust_remote_code=model.engine.model.trust_remote_code)
    run = open_run(config, say)
    with ExitStack() as undo, plain_errors():
        undo.callback(run.folder.remove_if_unused)
        undo.callback(run.lock.release)
        undo.callback(withdraw_stacks, run.folder.logs)
        backend = make_backend(config.trainer, run.names[1], run.folder, say)
        undo.callback(backend.shutdown)
        yield run, backend
        undo.pop_all()


def _data(backend: Backend, worker: type[Worker], *given: Any, **named: Any) -> tuple[WorkerGroup, DataFacts]:
    """Start the worker group that reads the data; return the group and the facts about the data.

    Args:
        backend: Runs the worker.
        worker: The worker class.
        given: Positional arguments of the worker class.
        named: Keyword arguments of the worker class.

    Raises:
        DataError: The data cannot be used.
    """
    data = WorkerGroup(backend, partial(worker, *given, **named), CONTROLLER_POOL, role="data")
    return data, data.describe()


def _prompts(order: DataConfig, data: WorkerGroup, facts: DataFacts) -> Prompts:
    """Return the object that supplies a generation batch of prompts for each step.

    Raises:
        DataError: There are too few rows for one generation batch.
    """
    return Prompts(
        data,
        facts,
        order.prompts_at_a_time,
        shuffle=order.shuffle,
        seed=order.seed,
        mixture=order.mixture,
        drawn=order.sampler.class_name is not None,
    )


def _evaluator(config: TrainConfig, batches: int, stops: tuple[int, ...]) -> Evaluator | None:
    """Return the evaluator of the validation batches, or None if there are no batches."""
    params = sampling(config, stops, validation=True)
    n, run = config.actor_rollout_ref.rollout.val_kwargs.n, config.trainer
    shown = run.log_val_generations
    return Evaluator(batches, n, params, run.samples_freq > 0 or shown > 0, shown) if batches else None
