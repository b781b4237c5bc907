"""What all workers that hold an engine share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.config.batching import Batching
from tandem.engines.train.base import LossFn, MicroBatching, TrainEngine
from tandem.errors import NonFiniteError
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.observability.timers import Timeline
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, Worker, register


def micro_batching(batching: Batching) -> MicroBatching:
    return MicroBatching(max_samples=batching.max_samples, max_tokens=batching.max_tokens)


class EngineWorker(Worker):
    """A worker with timed phases.

    Args:
        run: the run folder: phases go to its timeline, the batch of a non-finite update to its log.
        name: what the timeline calls this worker.
        device: where its models live.
    """

    def __init__(self, run: RunFolder, name: str, device: torch.device) -> None:
        super().__init__()
        self.run = run
        synchronize = torch.cuda.synchronize if device.type == "cuda" else None
        self.timeline = Timeline(
            run.timeline_file, process=f"{name} rank {self.rank}", synchronize=synchronize
        )
        self.observed = Metrics()

    def say(self, sentence: str) -> None:
        """To the user and to the run's log."""
        self.run.log(sentence)
        print(sentence, flush=True)

    @contextmanager
    def on_device(self, engine: TrainEngine, *, training: bool = False) -> Iterator[None]:
        """The engine's offloaded parameters, and for training its optimizer state, are on its device
        inside, and offloaded again afterwards."""
        engine.onload(optimizer=training)
        try:
            yield
        finally:
            engine.offload()

    def guarded_step(
        self, engine: TrainEngine, batch: DataProto, loss: LossFn, batching: Batching, role: str
    ) -> Metrics:
        """One optimizer step.

        Raises:
            NonFiniteError: as the engine raised it, with the path the batch was saved to.
        """
        try:
            return engine.train_step(batch, loss, micro=micro_batching(batching))
        except NonFiniteError as error:
            path = self.run.logs / f"{role}_update_{engine.version}_rank_{self.rank}.pt"
            batch.save(path)
            error.field = f"{role} update {engine.version}"
            error.remedy = (
                f"look at the batch: DataProto.load('{path}'); lower the learning rate or check the rewards"
            )
            raise

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_observed(self) -> Metrics:
        """What was measured besides the methods' results since the last call."""
        observed, self.observed = self.observed, Metrics()
        return observed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_timings(self) -> dict[str, float]:
        """Seconds per phase since the last call, as `timing/PHASE`."""
        return self.timeline.take()
