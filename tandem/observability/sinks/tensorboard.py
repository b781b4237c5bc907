"""The sink for TensorBoard: event files under RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent

from torch.utils.tensorboard import SummaryWriter

from tandem.observability.sinks.base import GENERATIONS, Generation, RunInfo


class TensorBoardSink:
    def __init__(self, info: RunInfo) -> None:
        self._folder = str(info.folder / "tensorboard")
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._opened(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        for number, each in enumerate(generations):
            # TensorBoard shows indented text unchanged and renders other text as Markdown.
            text = indent(
                f"{each.prompt}\n\n{each.response}\n\nscore {each.score:g}", "    ", lambda line: True
            )
            self._opened(step).add_text(f"{GENERATIONS}/{number}", text, step)

    def _opened(self, step: int) -> SummaryWriter:
        if self._writer is None:
            # In a resumed run, hide what an earlier process wrote from this step on.
            self._writer = SummaryWriter(self._folder, purge_step=step)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
