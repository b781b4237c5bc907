"""Learning from examples, over the same pools, engine, run folder and checkpoints as reinforcement
learning. What is learnt, from which data and by which loss, is a `Task`; the loop is the same for all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.config.load import to_dict, to_yaml
from tandem.config.supervised import SupervisedConfig
from tandem.data.loader import Dataset
from tandem.device import choose_device
from tandem.engines.train.base import LossFn
from tandem.engines.train.module import Kind
from tandem.models.loading import load_tokenizer
from tandem.observability.metrics import Metrics
from tandem.observability.sinks.base import RunInfo
from tandem.observability.stacks import withdraw_stacks
from tandem.runtime import Backend, BatchFuture, ResourcePool, Worker, WorkerGroup
from tandem.trainer.build import say_unused_offload
from tandem.trainer.launch import make_backend, plain_errors
from tandem.trainer.placing import CONTROLLER_POOL
from tandem.trainer.prompts import Prompts
from tandem.trainer.roles import slowest_timings
from tandem.trainer.session import OpenRun, Session, due, open_run
from tandem.workers.data import DataFacts, ExamplesWorker
from tandem.workers.supervised import SupervisedWorker


@dataclass(frozen=True)
class Task:
    """What is learnt.

    Attributes:
        name: stands before its metrics.
        role: of the model, in the run and in checkpoints.
        kind: of model.
        loss: what is minimised.
        dataset: makes a dataset of files and a tokenizer; a class with its options, for it travels.
    """

    name: str
    role: str
    kind: Kind
    loss: LossFn
    dataset: Callable[..., Dataset]


class SupervisedTrainer:
    """The controller of a supervised run.

    Args:
        config: the resolved config.
        name: stands before the task's metrics.
        data: the group that has the examples.
        model: the group that learns.
        batches: of training examples.
        val_batches: how many batches of held-out examples there are.
        total_steps: optimizer steps.
        session: the run folder, its metrics and checkpoints.
        backend: where the groups run.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        name: str,
        data: WorkerGroup,
        model: WorkerGroup,
        batches: Prompts,
        val_batches: int,
        total_steps: int,
        session: Session,
        backend: Backend,
    ) -> None:
        self.config = config
        self.name = name
        self.data = data
        self.model = model
        self.batches = batches
        self.val_batches = val_batches
        self.total_steps = total_steps
        self.session = session
        self.backend = backend

    def fit(self) -> None:
        """Runs to the last step, or to an interrupt, whose step is finished and saved first."""
        trainer = self.config.trainer
        with self.session as session:
            step = session.restore(self.load_state_dict)
            self._forget_measures()
            session.finishes_steps = True
            stop = False
            while step < self.total_steps and not stop:
                step += 1
                last = step == self.total_steps
                with session.phase("step"):
                    metrics = self.step(step, self.batches.next())
                metrics |= self._performance(metrics)
                if self.val_batches and due(trainer.test_freq, step, last):
                    with session.phase("testing"):
                        metrics |= self.validate()
                stop = session.interrupted  # read once: an interrupt after this is for the next step
                if due(trainer.save_freq, step, last) or stop:
                    session.save(step, self.state_dict(), metrics)
                session.log(step, metrics | session.timeline.take())
                session.check_save()
                self._forget_measures()

    def step(self, step: int, batch: BatchFuture) -> dict[str, float]:
        """One optimizer step.

        Args:
            step: its number, from 1.
            batch: `train_batch_size` rows.

        Returns:
            its metrics.
        """
        learnt: Metrics = self.model.update(batch)
        metrics = {f"{self.name}/{name}": value for name, value in learnt.to_floats().items()}
        metrics["training/epoch"] = self.batches.epoch
        metrics["training/tokens"] = float(batch.index.lengths["tokens"].sum())
        return metrics

    def validate(self) -> dict[str, float]:
        """The same measures on the held-out examples, `val/…`."""
        parts = [self.model.validate(self.data.val_batch(number)) for number in range(self.val_batches)]
        return {f"val/{name}": value for name, value in Metrics.merged(parts).to_floats().items()}

    def _performance(self, metrics: dict[str, float]) -> dict[str, float]:
        observed: Metrics = Metrics.merged(self.model.take_observed())
        seconds = self.session.timeline.take() | slowest_timings([self.data, self.model])
        rate = {"perf/step_tokens_per_s": metrics["training/tokens"] / seconds["timing/step"]}
        return seconds | rate | observed.to_floats() | self.backend.take_traffic()

    def _forget_measures(self) -> None:
        """What workers counted and timed outside of steps, such as loading models, is charged to none."""
        self.model.take_observed()
        slowest_timings([self.data, self.model])
        self.backend.take_traffic()

    def shutdown(self) -> None:
        """Ends all workers."""
        self.backend.shutdown()

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["loader"])


def build_supervised(
    config: SupervisedConfig, task: Task, *, say: Callable[[str], None]
) -> SupervisedTrainer:
    """The trainer of a resolved config. Its workers run until its `shutdown`; where this raises, they
    have been ended.

    Args:
        say: prints a sentence to the user.

    Raises:
        TandemError: the config asks for what is not there: a device, files, a logger.
    """
    trainer = config.trainer
    on_cpu = trainer.device == "cpu"  # elsewhere workers may be on machines that have what this one lacks
    if trainer.resolved_backend == "local":
        on_cpu = choose_device(trainer.device).type == "cpu"
    say_unused_offload({"fsdp_config": config.fsdp_config}, {"optim": config.optim}, on_cpu, say)
    tokenizer = load_tokenizer(
        config.model.tokenizer_path,
        custom_chat_template=config.model.custom_chat_template,
        trust_remote_code=config.model.trust_remote_code,
    )
    run = open_run(trainer, to_yaml(config), say)
    with ExitStack() as undo, plain_errors():
        undo.callback(run.folder.remove_if_unused)
        undo.callback(withdraw_stacks, run.folder.logs)
        backend = make_backend(trainer, run.folder, say)
        undo.callback(backend.shutdown)
        ((name, counts),) = trainer.pools.items()
        pool = ResourcePool(counts, name)
        backend.reserve([CONTROLLER_POOL, pool])
        read = partial(task.dataset, tokenizer=tokenizer)
        examples: type[Worker] = ExamplesWorker
        data = WorkerGroup(
            backend, partial(examples, config.data, read, run.folder), CONTROLLER_POOL, role="data"
        )
        facts: DataFacts = data.describe()
        batches = Prompts(
            data,
            facts.rows,
            config.data.train_batch_size,
            shuffle=config.data.shuffle,
            seed=config.data.seed,
        )
        steps = trainer.total_training_steps or trainer.total_epochs * batches.steps_per_epoch
        worker: type[Worker] = SupervisedWorker
        factory = partial(
            worker, config, role=task.role, kind=task.kind, loss=task.loss, total_steps=steps, run=run.folder
        )
        model = WorkerGroup(backend, factory, pool, role=task.role, balance=trainer.balance_batch)
        session = _session(config, run, {task.role: model}, steps, say)
        made = SupervisedTrainer(
            config, task.name, data, model, batches, facts.val_batches, steps, session, backend
        )
        undo.pop_all()
    return made


def _session(
    config: SupervisedConfig,
    run: OpenRun,
    members: dict[str, WorkerGroup],
    steps: int,
    say: Callable[[str], None],
) -> Session:
    trainer = config.trainer
    info = RunInfo(
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        folder=run.folder.path,
        total_steps=steps,
        config=to_dict(config),
    )
    return Session(run, trainer.logger, info, members, say=say)
