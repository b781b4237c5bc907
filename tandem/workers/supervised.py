"""The worker that trains a model on examples, with a training engine and a supervised loss."""

from __future__ import annotations

import torch

from tandem.config.supervised import SupervisedConfig
from tandem.engines.train.base import Counts, LossFn
from tandem.engines.train.fsdp import FSDPEngine
from tandem.engines.train.microbatch import flat, sequences
from tandem.engines.train.module import Kind
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, register
from tandem.workers.base import EngineWorker, micro_batching, seeded


class SupervisedWorker(EngineWorker):
    """The worker that trains on examples and computes the loss on validation examples.

    Args:
        config: The resolved config.
        role: The name of the worker in the run.
        kind: The type of model, which determines its head.
        loss: The loss to minimize. Validation reports the same metrics as the loss.
        total_steps: The optimizer steps of the whole run, for the learning rate schedule.
        run: See `EngineWorker`.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        *,
        role: str,
        kind: Kind,
        loss: LossFn,
        total_steps: int,
        run: RunFolder,
    ) -> None:
        trainer = config.trainer
        super().__init__(run, role, trainer.device, trainer.timeouts.collective)
        self.config = config
        self.role = role
        self.loss = loss
        with seeded(trainer.seed):
            engine = FSDPEngine(
                config.model.path,
                kind=kind,
                model=config.model,
                fsdp=config.fsdp_config,
                optim=config.optim,
                total_steps=total_steps,
                sequence_parallel=config.ulysses_sequence_parallel_size,
                device=self.device,
                say=self.say_for(role),
            )
        self.engine = self.hold(role, engine)

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, collect="first", balance="tokens")
    def update(self, batch: DataProto) -> Metrics:
        """Take one optimizer step."""
        with self.timeline.phase("update"), self.on_device(self.engine, training=True):
            return self.guarded_step(self.role, batch, self.loss, self.config)

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, collect="first", balance="tokens")
    def validate(self, batch: DataProto) -> Metrics:
        """Return the metrics of the loss on a validation batch, over all ranks."""
        with self.timeline.phase("validate"), self.on_device(self.engine):
            micro = micro_batching(self.config.train_batching)
            out = self.engine.forward(batch, outputs=self.loss.outputs, micro=micro)
            _, metrics = self.loss(
                {name: flat(out, name) for name in self.loss.outputs},
                {name: flat(batch, name) for name in self.loss.columns},
                sequences(batch).offsets,
                Counts(tokens=1, sequences=1),  # only the loss's value needs them, and it is not used
            )
            return metrics.all_reduced(None, torch.device("cpu"))
