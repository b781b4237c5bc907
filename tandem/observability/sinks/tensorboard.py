"""TensorBoard event files under RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from tandem.observability.sinks.base import RunInfo


class TensorBoardSink:
    def __init__(self, info: RunInfo) -> None:
        self._folder = str(info.folder / "tensorboard")
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            # Hides what an earlier process wrote from this step on, when the run is a resumed one.
            self._writer = SummaryWriter(self._folder, purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
