"""The base classes of workers.

A worker has timed phases, metrics and messages for the user. A worker with an engine also has a device and a
process group, and saves the batch of an update that failed.
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
"""The config sections that belong to a trained model."""


def micro_batching(batching: Batching) -> MicroBatching:
    return MicroBatching(max_samples=batching.max_samples, max_tokens=batching.max_tokens)


def response_texts(tokenizer: PreTrainedTokenizerBase, batch: DataProto) -> list[str]:
    """Return the decoded response of each sample, without special tokens."""
    rows = zip(batch.ragged("tokens"), batch.ragged("response_mask"), strict=True)
    # Decode one by one, because `batch_decode` treats an empty list as one empty response.
    return [str(tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)) for row, keep in rows]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random generator inside the block, with the same seed on every rank.

    This is used for random initial weights. After the block, the generator has the same state as before the
    block.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class TimedWorker(Worker):
    """A worker with timed phases, observed metrics, and messages for the user.

    Args:
        run: The run folder. Phases are written to its timeline, and messages to its log.
        name: The name of the worker in the timeline. This is the worker's role.
        device: The device on which the worker computes. If it is a GPU, the clock waits for the GPU at the
            end of a phase.
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
        """Write a message with `say`, unless a message about the topic `about` was written before."""
        if about not in self._said_topics:
            self._said_topics.add(about)
            self.say(sentence)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_observed(self) -> Metrics:
        """Return the metrics that the worker has recorded since the last call and no method has returned."""
        observed, self.observed = self.observed, Metrics()
        return observed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_timings(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call. The keys are `timing/PHASE`."""
        return self.timeline.take()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_profile(self, ranks: Collection[int] | None, memory: bool) -> None:
        """Start to profile this process if its rank is in `ranks`; None means all ranks."""
        if ranks is None or self.rank in ranks:
            profile.begin(self._track.replace(" ", "_"), memory=memory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_profile(self, folder: Path, memory: bool) -> None:
        """Stop the profile and write it into the folder; see `tandem.observability.profile.end`."""
        profile.end(folder, memory=memory)


class EngineWorker(TimedWorker):
    """A worker that holds engines, in the process group of its pool.

    Args:
        run: See `TimedWorker`. The batch of a non-finite update is saved in its log folder.
        name: See `TimedWorker`.
        device: The device of the models: "auto", "cpu" or "cuda". "auto" is resolved in the worker's process.
        collective_timeout_s: The time limit of one collective, in seconds. None means PyTorch's default.
    """

    def __init__(
        self, run: RunFolder, name: str, device: str, collective_timeout_s: float | None = None
    ) -> None:
        self.device = choose_device(device)
        init_distributed(self.device, timeout_s=collective_timeout_s)
        super().__init__(run, name, self.device)
        self.engines: dict[str, TrainEngine] = {}
        self._consecutive_skips = Counter[str]()  # role → the number of consecutive skipped steps
        self._skipped = Counter[str]()
        self._writes = defaultdict[str, BackgroundWrite](BackgroundWrite)

    def trained(self, role: str = "") -> TrainEngine:
        """Return the engine whose state is stored in checkpoints.

        This is the engine of `role`. If `role` is empty, it is the engine whose role is the worker's name.

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
        """Write the model, optimizer state and version of an engine into the empty folder `path`.

        `trained` defines which engine a role has.
        """
        self.trained(role).save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, path: Path, role: str = "") -> None:
        """Start a save in the background, and return when the state has been copied to the host.

        The folder's `written_mark` appears after all ranks have written their state.
        """
        write = self.trained(role).stage(path)
        self._writes[role].start(write, written_mark(path) if self.rank == 0 else None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_save(self, role: str = "") -> None:
        """Check whether the save that `begin_save` started has failed.

        Raises:
            Exception: The error that stopped the save.
        """
        self._writes[role].check()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path, role: str = "") -> None:
        """Load a checkpoint, which may come from a different number of ranks."""
        self.trained(role).load(path)

    def say_for(self, role: str) -> Callable[[str], None]:
        """Return a function that writes messages of a role's engine to the log.

        The function holds no reference to the worker.
        """
        worker = weakref.proxy(self)
        return lambda sentence: worker.say(f"{role}: {sentence}")

    def hold(self, role: str, engine: AnyEngine) -> AnyEngine:
        """Register a new engine under a role, and offload it.

        The engine's collectives are reported under `role`, and batches for the engine are sharded over the
        mesh with the name `role`. If only some parameters are trained, a message tells the user how many. On
        a CUDA device, a message also names the kernels that the engine uses.
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
        """Return the metrics that the worker has recorded since the last call and no method has returned.

        Further metrics for each role, with seconds and bytes averaged over ranks:

        - `perf/collective_s/ROLE` and `perf/collective_bytes/ROLE`: the seconds and bytes of collectives.
        - `perf/threads/ROLE`: the number of threads of CPU kernels, which affects the exact bits of results.
        - `perf/offload_s/ROLE`, `perf/onload_s/ROLE` and the same names with `_bytes`: the seconds and bytes
          of copies of state to the host and back. They are present only if state was copied.
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
            DeviceMemoryError: The device did not have enough memory. The message lists how the memory was
                used.
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
        """Add a list of how the device's memory was used to the error's message.

        The list has the memory of this engine, the memory of other engines, and the remaining memory of
        PyTorch's allocator, which the running pass uses. It also has the memory that the allocator could not
        use because of fragmentation, and the memory outside PyTorch.
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
        """Time a phase during which the engine is on its device; see `on_device`.

        On a GPU, the peak memory of PyTorch's allocator is recorded as `perf/memory_peak_bytes/PHASE`.
        """
        peak = self.counted_memory(f"perf/memory_peak_bytes/{phase}", beyond=False)
        with self.timeline.phase(phase), peak, self.on_device(engine, training=training):
            yield

    @contextmanager
    def counted_memory(self, name: str, *, beyond: bool = True) -> Iterator[None]:
        """Add the peak GPU memory of a block to the metrics.

        Args:
            name: The name of the metric.
            beyond: Whether to subtract the memory that was in use before the block.
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

        A step is skipped only if fewer than `skip_non_finite_steps` consecutive steps were skipped
        immediately before. A skipped step changes no state: weights, version and learning rate schedule stay
        the same. If steps may be skipped, the metrics include `skipped_steps`, the number of skipped steps
        since this worker started. A skipped step has no other metrics.

        Args:
            role: The role of the trained engine.
            batch: The mini-batch.
            loss: The loss.
            section: The config section that sets the optimizer and the batching of updates.
            rejects: Whether the loss may leave out every token.

        Raises:
            NonFiniteError: The error that the engine raised on every rank, with the path of the file in which
                this rank saved its shard of the batch.
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
