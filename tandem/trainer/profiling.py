"""Profile the steps in `trainer.profile.steps`, on every rank that the config selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tandem.config.trainer import ProfileConfig
from tandem.observability import profile
from tandem.observability.reading import listed
from tandem.observability.run import RunFolder, read_metrics
from tandem.runtime import WorkerGroup
from tandem.trainer.perf import offered


class StepProfiler:
    """Writes profiles of single steps to RUN/profile.

    Args:
        config: Which steps and ranks to profile.
        folder: The run folder.
        say: Prints a sentence for the user and writes it to the run's log.
    """

    def __init__(self, config: ProfileConfig, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._config, self._folder, self._say = config, folder, say

    @contextmanager
    def around(self, step: int, groups: Sequence[WorkerGroup]) -> Iterator[None]:
        """Profile the block if `step` is one of the steps to profile."""
        if step not in self._config.steps:
            yield
            return
        ranks, memory = self._config.ranks, self._config.memory
        folder = self._folder.path / "profile"
        parts = folder / f"step_{step:06d}"
        profile.begin("controller", memory=memory)
        for group in groups:
            offered(group, "begin_profile", ranks, memory)
        try:
            yield
        except BaseException:  # the run ends, and its cause may be a worker that no longer answers
            profile.end(parts, memory=memory)
            raise
        for group in groups:
            offered(group, "end_profile", parts, memory)
        profile.end(parts, memory=memory)
        path = folder / f"{parts.name}.json.gz"
        processes = profile.merge(parts, self._folder.timeline_file, path)
        snapshots = any(parts.iterdir())
        if not snapshots:
            parts.rmdir()
        more = f"; memory: {parts}" if snapshots else ""
        if memory and not snapshots:
            more = "; memory snapshots need CUDA: here the trace itself contains the allocations"
        count = "1 process" if processes == 1 else f"{processes} processes"
        self._say(f"profile of step {step}, {count}: {path} (open it in ui.perfetto.dev){more}")

    def tell(self) -> None:
        """Print how a step spends its time, if the config asks to profile any steps.

        Profiled steps take longer, so they are used only if all steps were profiled.
        """
        if not self._config.steps:
            return
        rows = [row for row in read_metrics(self._folder.metrics_file) if "timing/step" in row]
        plain = [row for row in rows if row["step"] not in self._config.steps] or rows
        if late := [step for step in self._config.steps if step > rows[-1]["step"]]:
            self._say(f"not profiled: trainer.profile.steps {listed(late)}, beyond the last step")
        self._say(f"mean of {len(plain)} steps:\n{profile.breakdown(plain)}")
