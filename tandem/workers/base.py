"""The base classes of workers.

They provide timed phases and observed metrics. A worker with an engine also has a device, a share of the
process group, and a record of updates that failed.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from tandem.checkpoint.background import BackgroundWrite, written_mark
from tandem.config.actor import ActorConfig
from tandem.config.batching import Batching
from tandem.config.critic import CriticConfig
from tandem.config.supervised import SupervisedConfig
from tandem.device import choose_device, memory_use
from tandem.engines.train.base import LossFn, MicroBatching, TrainEngine
from tandem.errors import DeviceMemoryError, EngineError, NonFiniteError, NoTokensError
from tandem.models.parallel import init_distributed
from tandem.observability import profile
from tandem.observability.metrics import Metrics
from tandem.observability.run import RunFolder
from tandem.observability.timers import Timeline
from tandem.protocol import DataProto
from tandem.runtime import Dispatch, Worker, register

AnyEngine = TypeVar("AnyEngine", bound=TrainEngine)
Learning = ActorConfig | CriticConfig | SupervisedConfig
"""The config section of a model that is trained."""


def micro_batching(batching: Batching) -> MicroBatching:
    return MicroBatching(max_samples=batching.max_samples, max_tokens=batching.max_tokens)


def response_texts(tokenizer: PreTrainedTokenizerBase, batch: DataProto) -> list[str]:
    """Return the decoded response of each sample, without special tokens."""
    rows = zip(batch.ragged("tokens"), batch.ragged("response_mask"), strict=True)
    # Decode one by one, because `batch_decode` treats an empty list as one empty response.
    return [str(tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)) for row, keep in rows]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed random draws inside the block, such as weights that are not in any file, equally on every rank.

    After the block, the random generator continues as if nothing had been drawn.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class TimedWorker(Worker):
    """A worker with timed phases, observed metrics, and messages for the user.

    Args:
        run: The run folder. Phases are written to its timeline, and messages to its log.
        name: The worker's name in the timeline, which is its role.
        device: The device of its work, if the clock must wait for the device.
    """

    def __init__(self, run: RunFolder, name: str, device: torch.device | None = None) -> None:
        super().__init__()
        self.run = run
        self._name, self._track = name, f"{name} rank {self.rank}"
        on_cuda = device is not None and device.type == "cuda"
        self.timeline = Timeline(
            run.timeline_file,
            process=self._track,
            synchronize=torch.cuda.synchronize if on_cuda else None,
            ranges=torch.cuda.nvtx.range if on_cuda else None,
        )
        self.observed = Metrics()
        self._said_topics: set[str] = set()

    def say(self, sentence: str) -> None:
        """Write a message to the run's log, and show it to the user if this is the first rank."""
        self.run.log(sentence if self.world_size == 1 else f"[{self._track}] {sentence}")
        if self.rank == 0:
            self.tell(sentence)

    def say_once(self, about: str, sentence: str) -> None:
        """Write a message, unless a message about the same topic was written before."""
        if about not in self._said_topics:
            self._said_topics.add(about)
            self.say(sentence)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_observed(self) -> Metrics:
        """Return the metrics that were observed since the last call, apart from the results of methods."""
        observed, self.observed = self.observed, Metrics()
        return observed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_timings(self) -> dict[str, float]:
        """Return the seconds per phase since the last call, as `timing/PHASE`."""
        return self.timeline.take()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_profile(self, ranks: Collection[int] | None, memory: bool) -> None:
        """Start to profile this process if its rank is in `ranks`; None means all ranks."""
        if ranks is None or self.rank in ranks:
            profile.begin(self._track.replace(" ", "_"), memory=memory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_profile(self, folder: Path, memory: bool) -> None:
        """End the profile and write it into the folder; see `tandem.observability.profile.end`."""
        profile.end(folder, memory=memory)


class EngineWorker(TimedWorker):
    """A worker that holds engines, in the process group of its pool.

    Args:
        run: See `TimedWorker`. The batch of a non-finite update is saved in its log folder.
        name: See `TimedWorker`.
        device: The device of the models: "auto", "cpu" or "cuda". It is chosen in the worker's own process.
        collective_timeout_s: The time limit of one collective, in seconds; None takes PyTorch's own limit.
    """

    def __init__(
        self, run: RunFolder, name: str, device: str, collective_timeout_s: float | None = None
    ) -> None:
        self.device = choose_device(device)
        init_distributed(self.device, timeout_s=collective_timeout_s)
        super().__init__(run, name, self.device)
        self.engines: dict[str, TrainEngine] = {}
        self._consecutive_skips = Counter[str]()  # by role: the number of steps skipped in a row
        self._skipped = Counter[str]()
        self._writes = defaultdict[str, BackgroundWrite](BackgroundWrite)

    def trained(self, role: str = "") -> TrainEngine:
        """Return the engine whose state goes into checkpoints: the engine of a role, or the worker's own.

        Raises:
            EngineError: This worker has no such engine.
        """
        wanted = role or self._name
        if wanted not in self.engines:
            raise EngineError(
                "this worker has no weights of its own for this role",
                got=f"{self._track}, with {', '.join(self.engines)}",
                expected=wanted,
                remedy="call the method on the worker group that was created with this role",
            )
        return self.engines[wanted]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path, role: str = "") -> None:
        """Write a model, its optimizer state and its version into the empty folder `path`; see `trained`."""
        self.trained(role).save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, path: Path, role: str = "") -> None:
        """Start a save in the background, and return once the state is copied to the host.

        The folder's `written_mark` appears after all ranks have written their state.
        """
        write = self.trained(role).stage(path)
        self._writes[role].start(write, written_mark(path) if self.rank == 0 else None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_save(self, role: str = "") -> None:
        """Check the save that `begin_save` started.

        Raises:
            Exception: The error that stopped the save.
        """
        self._writes[role].check()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path, role: str = "") -> None:
        """Load a checkpoint, which may come from a different number of ranks."""
        self.trained(role).load(path)

    def say_for(self, role: str) -> Callable[[str], None]:
        """Return a function that writes messages of a role's engine. It keeps no reference to the worker."""
        worker = weakref.proxy(self)
        return lambda sentence: worker.say(f"{role}: {sentence}")

    def hold(self, role: str, engine: AnyEngine) -> AnyEngine:
        """Register a new engine under a role, and offload it.

        Its collectives are reported under `role`, and batches for it are divided over the mesh of that name.
        A message tells the user how many parameters are trained if not all are, and on a CUDA device which
        kernels the engine uses.
        """
        self.engines[role] = engine
        if self.device.type == "cuda":
            self.say(f"{role}: {engine.kernels}.")
        info = engine.state_info()
        trained, whole = info["trainable_parameters"], info["parameters"]
        if 0 < trained < whole:
            self.say(f"{role}: {trained:,} of {whole:,} parameters are trained.")
        self.register_mesh(role, engine.share.rank, engine.share.size, collects=engine.share.leads)
        engine.offload()
        return engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_observed(self) -> Metrics:
        """Return the metrics that were observed since the last call, apart from the results of methods.

        They include the seconds and bytes of collectives by role, `perf/collective_s/ROLE` and
        `perf/collective_bytes/ROLE`, and the number of threads of CPU kernels, `perf/threads/ROLE`, which
        affects the exact bits of results. If state was copied to the host or back, the seconds and bytes of
        these copies are `perf/offload_s/ROLE`, `perf/onload_s/ROLE` and `_bytes`. Seconds and bytes are
        averaged over ranks.
        """
        observed = super().take_observed()
        for role, engine in self.engines.items():
            seconds, received = engine.take_collectives()
            observed.add_mean(f"perf/collective_s/{role}", seconds, 1.0)
            observed.add_max(f"perf/threads/{role}", torch.get_num_threads())
            observed.add_mean(f"perf/collective_bytes/{role}", float(received), 1.0)
            for way, (took, copied) in engine.take_transfers().items():
                if copied:
                    observed.add_mean(f"perf/{way}_s/{role}", took, 1.0)
                    observed.add_mean(f"perf/{way}_bytes/{role}", float(copied), 1.0)
        return observed

    @contextmanager
    def on_device(self, engine: TrainEngine, *, training: bool = False) -> Iterator[None]:
        """Load the engine's offloaded parameters to its device, and offload them again after the block.

        Args:
            engine: The engine.
            training: Whether to load the optimizer state too.

        Raises:
            DeviceMemoryError: The device did not have enough memory. The error lists what the memory was used
                for.
        """
        engine.onload(optimizer=training)
        try:
            yield
        except DeviceMemoryError as short:
            self._add_memory_use(short, engine, training=training)
            raise
        except torch.OutOfMemoryError as error:
            found = DeviceMemoryError(
                "the GPU does not have enough memory for a forward pass without gradient",
                use=memory_use(self.device),
                got=str(error).partition("\n")[0],
                remedy="use fewer tokens per micro-batch and device",
            )
            self._add_memory_use(found, engine, training=training)
            raise found from error
        finally:
            engine.offload()

    def _add_memory_use(self, short: DeviceMemoryError, engine: TrainEngine, *, training: bool) -> None:
        """Add the use of the device's memory to the error.

        PyTorch's memory is divided into that of this engine, that of other engines, and the rest, which
        belongs to the pass. The error also names memory that the allocator could not use because of gaps, and
        memory outside PyTorch.
        """
        bytes_of = {
            role: [size for key, size in each.state_info().items() if f"@{self.device.type}" in key]
            for role, each in self.engines.items()
        }
        short.role = next(role for role, each in self.engines.items() if each is engine)
        short.training = training
        if short.use:
            own, use = sum(bytes_of.pop(short.role)), short.use
            others = sum(map(sum, bytes_of.values()))
            short.held = {
                "weights and optimizer": own,
                "other models": others,
                "the pass": use["allocated"] - own - others,
                "gaps": use["reserved"] - use["allocated"],
                "outside PyTorch": use["used"] - use["reserved"],
            }

    @contextmanager
    def working(self, phase: str, engine: TrainEngine, *, training: bool = False) -> Iterator[None]:
        """Time a phase that has the engine on its device; see `on_device`.

        On a GPU, the peak memory of PyTorch's allocator is the metric `perf/memory_peak_bytes/PHASE`.
        """
        peak = self.counted_memory(f"perf/memory_peak_bytes/{phase}", beyond=False)
        with self.timeline.phase(phase), peak, self.on_device(engine, training=training):
            yield

    @contextmanager
    def counted_memory(self, name: str, *, beyond: bool = True) -> Iterator[None]:
        """Add the peak GPU memory of a block to the metrics.

        Args:
            name: The name of the metric.
            beyond: Whether to count only memory beyond what was in use before.
        """
        if self.device.type != "cuda":
            yield
            return
        before = torch.cuda.memory_allocated(self.device) if beyond else 0
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        peak = torch.cuda.max_memory_allocated(self.device) - before
        self.observed.add_max(name, float(peak))

    def guarded_step(
        self, role: str, batch: DataProto, loss: LossFn, section: Learning, *, rejects: bool = False
    ) -> Metrics:
        """Take one optimizer step, and skip the step if its loss or gradient is not finite.

        A step is skipped only if fewer than `skip_non_finite_steps` steps were skipped right before it. Then
        nothing changes, also not the version and the learning rate schedule. If steps may be skipped, the
        metrics include `skipped_steps`, the number since this worker started. A skipped step has no other
        metrics.

        Args:
            role: The role of the trained engine.
            batch: The mini-batch.
            loss: The loss.
            section: The config section with the batching of the updates and the optimizer.
            rejects: Whether the loss may leave out every token.

        Raises:
            NonFiniteError: The error that the engine raised on every rank, with the path of this rank's saved
                share of the batch.
        """
        engine, optim = self.engines[role], section.optim
        before, version = self._consecutive_skips[role], engine.version
        try:
            metrics = engine.train_step(batch, loss, micro=micro_batching(section.train_batching))
            self._consecutive_skips[role] = 0
            rejected = engine.version == version
        except NoTokensError:
            if not rejects:
                raise
            metrics, rejected = Metrics(), True
        except NonFiniteError as error:
            again = f"_again_{before}" if before else ""
            path = self.run.logs / f"{role}_update_{engine.version}{again}_rank_{self.rank}.pt"
            batch.save(path)
            error.field = f"{role} update {engine.version}"
            error.remedy = (
                f"inspect the batch with DataProto.load('{path}')"
                + (" and the other ranks' shares in addition to it" if self.world_size > 1 else "")
                + "; lower the learning rate or check the rewards"
            )
            if before >= optim.skip_non_finite_steps:
                raise
            self._consecutive_skips[role] += 1
            self._skipped[role] += 1
            self.say(
                f"{error.field}: {error.message}; skipped ({before + 1} in a row, "
                f"{optim.skip_non_finite_steps} allowed); {error.remedy}"
            )
            metrics, rejected = Metrics(), False
        if rejected:
            self.say(f"{role} update {version}: every token was rejected, so no step was taken")
        if optim.skip_non_finite_steps:
            metrics.add_max("skipped_steps", self._skipped[role])
        return metrics
