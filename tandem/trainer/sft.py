"""Supervised fine-tuning: next-token cross-entropy on what the assistant said, over the same engine,
run folder and checkpoints as reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tandem.config.load import to_dict, to_yaml
from tandem.config.sft import SFTConfig
from tandem.data.loader import BatchLoader, EveryRow
from tandem.data.sft import SFTDataset
from tandem.device import choose_device
from tandem.engines.train.fsdp import FSDPEngine
from tandem.models.loading import load_tokenizer
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.observability.sinks.base import RunInfo
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, LocalBackend, ResourcePool, Worker, WorkerGroup, register
from tandem.trainer.session import Session, due, open_run
from tandem.workers.base import EngineWorker, micro_batching
from tandem.workers.losses import NextTokenLoss


class SFTWorker(EngineWorker):
    """A policy that imitates.

    Args:
        config: the resolved config.
        total_steps: optimizer steps of the whole run, for the schedule.
        run: the run folder.
    """

    def __init__(self, config: SFTConfig, *, total_steps: int, run: RunFolder) -> None:
        super().__init__(run, "sft", config.trainer.device)
        self.batching = config.train_batching
        self.engine = FSDPEngine(
            config.model.path,
            kind="policy",
            model=config.model,
            fsdp=config.fsdp_config,
            optim=config.optim,
            total_steps=total_steps,
            device=self.device,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, collect="first")
    def update(self, batch: DataProto) -> Metrics:
        """One optimizer step."""
        with self.timeline.phase("update"):
            return self.guarded_step(self.engine, batch, NextTokenLoss(), self.batching, "sft")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, collect="first")
    def validate(self, batch: DataProto) -> Metrics:
        """`val/loss`: mean negative log-likelihood of the learnt tokens, nats."""
        out = self.engine.forward(
            batch, outputs=frozenset({"log_probs"}), micro=micro_batching(self.batching)
        )
        mask = batch.ragged("response_mask").values
        metrics = Metrics()
        metrics.add_mean("val/loss", -out.ragged("log_probs").values[mask].sum(), int(mask.sum()))
        return metrics.all_reduced(None, torch.device("cpu"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path) -> None:
        self.engine.save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path) -> None:
        self.engine.load(path)


class SFTTrainer:
    """The controller of a supervised run.

    Args:
        config: the resolved config.
        worker: the policy's group.
        loader: training sequences.
        validation: held-out sequences, or None.
        total_steps: optimizer steps.
        session: the run folder, its metrics and checkpoints.
    """

    def __init__(
        self,
        config: SFTConfig,
        worker: WorkerGroup,
        loader: BatchLoader,
        validation: SFTDataset | None,
        total_steps: int,
        session: Session,
    ) -> None:
        self.config = config
        self.worker = worker
        self.loader = loader
        self.validation = validation
        self.total_steps = total_steps
        self.session = session

    def fit(self, until: Callable[[int], bool] = lambda step: False) -> int:
        """Runs to the last step, to an interrupt, or until `until` (given the steps done) says so.

        Returns:
            the steps done.
        """
        trainer = self.config.trainer
        with self.session as session:
            step = session.restore(self.load_state_dict)
            session.finishes_steps = True
            stop = False
            while step < self.total_steps and not stop and not until(step):
                step += 1
                last = step == self.total_steps
                with session.phase("step"):
                    batch = self.loader.next()
                    metrics = self._named(self.worker.update(batch))
                if self.validation is not None and due(trainer.test_freq, step, last):
                    with session.phase("testing"):
                        metrics |= self.validate()
                metrics["training/epoch"] = self.loader.epoch
                stop = session.interrupted  # read once: an interrupt after this is for the next step
                if due(trainer.save_freq, step, last) or stop:
                    session.save(step, self.state_dict(), metrics)
                session.log(step, metrics | self._timings(len(batch.ragged("tokens").values)))
        return step

    def validate(self) -> dict[str, float]:
        assert self.validation is not None
        batches = EveryRow(self.validation, self.config.data.train_batch_size)
        parts = [self.worker.validate(batch) for batch in batches]
        return Metrics.merged(parts).to_floats()

    def _timings(self, tokens: int) -> dict[str, float]:
        seconds = self.session.timeline.take()
        for taken in self.worker.take_timings():
            seconds |= taken
        seconds["perf/step_tokens_per_s"] = tokens / seconds["timing/step"]
        return seconds

    @staticmethod
    def _named(metrics: Metrics) -> dict[str, float]:
        return {f"sft/{name}": value for name, value in metrics.to_floats().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])


def build_sft(config: SFTConfig, *, say: Callable[[str], None]) -> SFTTrainer:
    """The trainer of a resolved config.

    Args:
        say: prints a sentence to the user.

    Raises:
        TandemError: the config asks for what is not there: a device, files, a logger.
    """
    choose_device(config.trainer.device)
    tokenizer = load_tokenizer(
        config.model.tokenizer_path,
        custom_chat_template=config.model.custom_chat_template,
        trust_remote_code=config.model.trust_remote_code,
    )
    data = config.data
    loader = BatchLoader(
        _dataset(config, tokenizer, data.train_files),
        data.train_batch_size,
        shuffle=data.shuffle,
        seed=data.seed,
    )
    validation = _dataset(config, tokenizer, data.val_files) if data.val_files else None
    steps = config.trainer.total_training_steps or config.trainer.total_epochs * loader.steps_per_epoch
    run = open_run(config.trainer, to_yaml(config), say)
    policy: type[Worker] = SFTWorker
    factory = partial(policy, config, total_steps=steps, run=run.folder)
    worker = WorkerGroup(LocalBackend(), factory, ResourcePool([1]), role="sft")
    session = Session(
        run,
        config.trainer.logger,
        RunInfo(
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name,
            folder=run.folder.path,
            total_steps=steps,
            config=to_dict(config),
        ),
        {"actor": worker},
        say=say,
    )
    return SFTTrainer(config, worker, loader, validation, steps, session)


def _dataset(config: SFTConfig, tokenizer: PreTrainedTokenizerBase, files: tuple[str, ...]) -> SFTDataset:
    data = config.data
    return SFTDataset(
        files,
        tokenizer,
        messages_key=data.messages_key,
        prompt_key=data.prompt_key,
        response_key=data.response_key,
        max_length=data.max_length,
        truncation=data.truncation,
        chat_template_kwargs=data.apply_chat_template_kwargs,
    )
