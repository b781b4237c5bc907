"""The base of workers: timed phases and observations; for a worker with an engine also its device, its share
of the process group, and the record of an update that went wrong."""

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
"""The section of a model that learns."""


def micro_batching(batching: Batching) -> MicroBatching:
    return MicroBatching(max_samples=batching.max_samples, max_tokens=batching.max_tokens)


def response_texts(tokenizer: PreTrainedTokenizerBase, batch: DataProto) -> list[str]:
    """The text that the policy wrote in each sample, decoded, without special tokens."""
    rows = zip(batch.ragged("tokens"), batch.ragged("response_mask"), strict=True)
    # One by one: `batch_decode` takes an empty list for one empty response.
    return [str(tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)) for row, keep in rows]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds what is drawn inside, such as weights that no folder holds, the same on every rank; afterwards
    the generator goes on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class TimedWorker(Worker):
    """A worker with timed phases, observations, and a voice.

    Args:
        run: the run folder: phases go to its timeline, sentences to its log.
        name: what the timeline calls this worker, its role.
        device: where its work is done, if the clock must wait for it.
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
        self._told: set[str] = set()

    def say(self, sentence: str) -> None:
        """To the user and to the run's log. Of several ranks the user hears the first, the log all."""
        self.run.log(sentence if self.world_size == 1 else f"[{self._track}] {sentence}")
        if self.rank == 0:
            self.tell(sentence)

    def say_once(self, about: str, sentence: str) -> None:
        """Say a sentence, unless one about the same thing was said before."""
        if about not in self._told:
            self._told.add(about)
            self.say(sentence)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_observed(self) -> Metrics:
        """The metrics that were observed besides the methods' results since the last call."""
        observed, self.observed = self.observed, Metrics()
        return observed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_timings(self) -> dict[str, float]:
        """Seconds per phase since the last call, as `timing/PHASE`."""
        return self.timeline.take()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_profile(self, ranks: Collection[int] | None, memory: bool) -> None:
        """Begins to profile this process, if its rank is one of these; None: all are."""
        if ranks is None or self.rank in ranks:
            profile.begin(self._track.replace(" ", "_"), memory=memory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_profile(self, folder: Path, memory: bool) -> None:
        """Ends it and writes it into the folder; see `tandem.observability.profile.end`."""
        profile.end(folder, memory=memory)


class EngineWorker(TimedWorker):
    """A worker that holds engines, in the process group of its pool.

    Args:
        run: see `TimedWorker`; the batch of a non-finite update goes to its log folder.
        name: see `TimedWorker`.
        device: where its models live, "auto", "cpu" or "cuda"; chosen in the worker's own process.
        collective_timeout_s: seconds one collective may take; None: PyTorch's own limit.
    """

    def __init__(
        self, run: RunFolder, name: str, device: str, collective_timeout_s: float | None = None
    ) -> None:
        self.device = choose_device(device)
        init_distributed(self.device, timeout_s=collective_timeout_s)
        super().__init__(run, name, self.device)
        self.engines: dict[str, TrainEngine] = {}
        self._in_succession = Counter[str]()  # by role, its last steps that were skipped
        self._skipped = Counter[str]()
        self._writes = defaultdict[str, BackgroundWrite](BackgroundWrite)

    def trained(self, role: str = "") -> TrainEngine:
        """The engine whose state goes into checkpoints: that of a role, or the worker's own.

        Raises:
            EngineError: this worker has no such engine.
        """
        wanted = role or self._name
        if wanted not in self.engines:
            raise EngineError(
                "this worker holds no weights of its own for that role",
                got=f"{self._track}, with {', '.join(self.engines)}",
                expected=wanted,
                remedy="call the method on the group whose workers were made with that role",
            )
        return self.engines[wanted]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: Path, role: str = "") -> None:
        """Writes a model, its optimizer and version into the empty folder `path`; see `trained`."""
        self.trained(role).save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, path: Path, role: str = "") -> None:
        """Begins a save in the background: returns once the state is copied to the host. The folder's
        `written_mark` appears when all ranks have written."""
        write = self.trained(role).stage(path)
        self._writes[role].start(write, written_mark(path) if self.rank == 0 else None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_save(self, role: str = "") -> None:
        """
        Raises:
            Exception: what a write begun by `begin_save` met with.
        """
        self._writes[role].check()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: Path, role: str = "") -> None:
        """Goes on from what was saved, at this or another number of ranks."""
        self.trained(role).load(path)

    def voice(self, role: str) -> Callable[[str], None]:
        """What says a sentence of that role's engine, which keeps no worker by it."""
        worker = weakref.proxy(self)
        return lambda sentence: worker.say(f"{role}: {sentence}")

    def hold(self, role: str, engine: AnyEngine) -> AnyEngine:
        """Takes a new engine in: its collectives are reported under `role`, and batches for it are divided
        over the mesh of that name; it starts offloaded. Where not all of its parameters are trained, the user
        hears how many are; on a CUDA device, on which kernels it runs."""
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
        """The metrics that were observed besides the methods' results since the last call; with them the
        seconds and bytes of collectives by role, `perf/collective_s/ROLE` and `perf/collective_bytes/ROLE`,
        the threads of CPU kernels, on which bits depend, `perf/threads/ROLE`,
        and where state went to the host or came back those of the copies, `perf/offload_s/ROLE`,
        `perf/onload_s/ROLE` and `_bytes`; they are averaged over ranks."""
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
        """The engine's offloaded parameters, and for training its optimizer state, are on its device
        inside, and offloaded again afterwards.

        Raises:
            DeviceMemoryError: the device's memory did not suffice inside; it says what was held.
        """
        engine.onload(optimizer=training)
        try:
            yield
        except DeviceMemoryError as short:
            self._account(short, engine, training=training)
            raise
        except torch.OutOfMemoryError as error:
            found = DeviceMemoryError(
                "the memory of the GPU does not suffice for a pass without gradient",
                use=memory_use(self.device),
                got=str(error).partition("\n")[0],
                remedy="fewer tokens per micro-batch and device",
            )
            self._account(found, engine, training=training)
            raise found from error
        finally:
            engine.offload()

    def _account(self, short: DeviceMemoryError, engine: TrainEngine, *, training: bool) -> None:
        """Adds what the device held: of PyTorch's memory that of the engine, of the others, and the rest,
        which is the pass's; what its allocator could not join; what others have taken."""
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
        """A timed phase with the engine on its device; see `on_device`. On a GPU the most memory that
        PyTorch's allocator held in it is a metric, `perf/memory_peak_bytes/PHASE`."""
        peak = self.counted_memory(f"perf/memory_peak_bytes/{phase}", beyond=False)
        with self.timeline.phase(phase), peak, self.on_device(engine, training=training):
            yield

    @contextmanager
    def counted_memory(self, name: str, *, beyond: bool = True) -> Iterator[None]:
        """The most memory that was held inside, on a GPU, as a metric.

        Args:
            beyond: count what was taken beyond that in use before.
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
        """Take one optimizer step, or none where the loss or gradient is not finite and fewer than
        `skip_non_finite_steps` were skipped just before: then nothing changes, the version and so the
        schedule included. Where steps may be skipped the metrics hold skipped_steps, the number since this
        worker began; those of a skipped step hold nothing else.

        Args:
            role: of the engine that learns.
            section: says how its updates are cut, and what its optimizer is.
            rejects: whether the loss may leave every token out.

        Raises:
            NonFiniteError: as the engine raised it on every rank, with the path this rank's share of
                the batch was saved to.
        """
        engine, optim = self.engines[role], section.optim
        before, version = self._in_succession[role], engine.version
        try:
            metrics = engine.train_step(batch, loss, micro=micro_batching(section.train_batching))
            self._in_succession[role] = 0
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
                f"look at the batch: DataProto.load('{path}')"
                + (" and the other ranks' shares beside it" if self.world_size > 1 else "")
                + "; lower the learning rate or check the rewards"
            )
            if before >= optim.skip_non_finite_steps:
                raise
            self._in_succession[role] += 1
            self._skipped[role] += 1
            self.say(
                f"{error.field}: {error.message}; skipped, {before + 1} in succession of "
                f"{optim.skip_non_finite_steps} allowed; {error.remedy}"
            )
            metrics, rejected = Metrics(), False
        if rejected:
            self.say(f"{role} update {version}: every token was rejected; nothing is learnt from it")
        if optim.skip_non_finite_steps:
            metrics.add_max("skipped_steps", self._skipped[role])
        return metrics
