"""Decode steps as CUDA graphs.

A decode step of a small batch is hundreds of short kernels, and launching them takes the host longer than
running them takes the device. A graph launches all of them at once, but always at the same addresses
and shapes. So a step's input is copied into fixed buffers and padded with rows that write nowhere
(slot -1) and whose logits are dropped, up to the next of a few sizes; one graph per size is replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tandem.engines.rollout.native.attention import Attention
from tandem.engines.rollout.native.paged import StepInput
from tandem.engines.rollout.native.runner import Runner
from tandem.engines.rollout.native.weights import Place, places

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Takes work on fixed buffers, which it may run, and returns what does it again."""

_MOST_ROWS = 512  # beyond, the device is busy for longer than the launches take


class CudaCapture:
    """Captures work as CUDA graphs of one memory pool: they may run only one at a time, and each overwrites
    what another left there."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and makes workspaces, which a capture must not
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


_BY_ROW = ("ids_T", "positions_T", "slots_T", "lengths_S", "tables_SB", "logits_L")


def _buffers(rows: int, max_blocks: int, device: torch.device, max_length: int) -> StepInput:
    """Make the input of a step of so many sequences of length 1, in block 0, that write nowhere."""
    index = torch.arange(rows + 1, device=device)
    return StepInput(
        ids_T=torch.zeros_like(index[1:]),
        positions_T=torch.zeros_like(index[1:]),
        slots_T=torch.full_like(index[1:], -1),
        starts_S1=index.int(),
        lengths_S=torch.ones_like(index[1:], dtype=torch.int32),
        tables_SB=torch.zeros(rows, max_blocks, dtype=torch.int32, device=device),
        logits_L=index[:-1],
        max_query=1,
        max_length=max_length,
    )


@dataclass(eq=False)
class GraphedRunner:
    """The forward of a runner, which replays decode steps and runs all others as they come.

    A graph is captured when its size is first needed, after one of the largest size, whose memory the
    others then share. Where a capture fails, everything is run as it comes from then on, after a warning.

    A graph holds addresses: it is good as long as the weights and the cache stay where they are, whatever is
    written there.

    Args:
        runner: does not wait for the device in a decode step, nor does the attention.
        attention: the one it is called with.
        max_num_seqs: sequences of a step, at most; steps of more than 512 are not captured.
        max_blocks: of the longest sequence.
        capture: how work is captured; by default as CUDA graphs.

    Attributes:
        replays: by the sizes there are graphs of.
    """

    runner: Runner
    attention: Attention
    max_num_seqs: int
    max_blocks: int
    capture: Capture = field(default_factory=CudaCapture)

    def __post_init__(self) -> None:
        self.sizes = graph_sizes(self.max_num_seqs)
        longest = self.max_blocks * self.attention.cache.block_size
        self._buffers = _buffers(self.sizes[-1], self.max_blocks, self.runner.device, longest)
        self.replays: dict[int, Work] = {}
        self._captured_over: tuple[Place, ...] = ()
        self._logits_LV: Tensor | None = None

    def is_over(self, runner: Runner, attention: Attention) -> bool:
        """Whether its graphs compute what this runner and this attention would: whether all that they read
        and write is where it was."""
        if runner is not self.runner or attention is not self.attention:
            return False
        return not self.replays or self._captured_over == self._places()

    def _places(self) -> tuple[Place, ...]:
        cache = self.attention.cache
        return places((*self.runner.reads(), *cache.keys, *cache.values))

    @torch.inference_mode()
    def prepare(self, sizes: Collection[int]) -> None:
        """Capture graphs of those of the sizes that it can have, before they are needed."""
        for size in sorted(sizes, reverse=True):
            if size in self.sizes:
                self._replay(size)

    @torch.inference_mode()
    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        """See `Runner`. The logits of a decode step are good until the next. If its `logits_L` are as many as
        its tokens, they are all of them in order."""
        assert attention is self.attention
        rows = len(step.ids_T)
        size = next((size for size in self.sizes if size >= rows), 0) if step.max_query == 1 else 0
        replay = self._replay(size) if size else None
        if replay is None:
            return self.runner.forward(step, attention)
        self._fill(step, size)
        replay()
        assert self._logits_LV is not None
        logits_LV = self._logits_LV[:rows]
        return logits_LV if len(step.logits_L) == rows else logits_LV[step.logits_L]

    def _fill(self, step: StepInput, size: int) -> None:
        """Put the step into the first rows, and what writes nowhere into the others up to the size. Their
        ids, positions and tables stay those of an earlier step, which are as good as any."""
        held, (rows, blocks) = self._buffers, step.tables_SB.shape
        for name in ("ids_T", "positions_T", "slots_T", "lengths_S"):
            getattr(held, name)[:rows].copy_(getattr(step, name))
        held.tables_SB[:rows, :blocks].copy_(step.tables_SB)
        if rows < size:
            held.slots_T[rows:size].fill_(-1)
            held.lengths_S[rows:size].fill_(1)

    def _replay(self, size: int) -> Work | None:
        """A replay of the step of that size on the buffers; None where it cannot be captured."""
        for needed in (self.sizes[-1], size):
            if needed in self.replays:
                continue
            if not self.replays:
                self._captured_over = self._places()
            # Nothing of a step stands in the buffers yet that running it twice could spoil.
            self._buffers.slots_T.fill_(-1)
            try:
                self.replays[needed] = self.capture(self._work(needed))
            except RuntimeError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                warnings.warn(
                    f"decoding is slower than it could be, because its steps cannot be captured: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                self.sizes = ()
                self.replays.clear()
                return None
        return self.replays[size]

    def _work(self, size: int) -> Work:
        held = self._buffers
        parts = {name: getattr(held, name)[:size] for name in _BY_ROW}
        step = replace(held, starts_S1=held.starts_S1[: size + 1], **parts)

        def work() -> None:
            logits_LV = self.runner.forward(step, self.attention)
            if self._logits_LV is None:  # in the first run, which is no capture
                self._logits_LV = logits_LV.new_empty(len(held.ids_T), logits_LV.shape[1])
            # Copied, for the graphs' outputs would otherwise be held side by side: gigabytes.
            self._logits_LV[:size].copy_(logits_LV)

        return work


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The sizes of the graphs, rising: 1, 2, 4, 8 and every 16 up to the most, itself included, or 512."""
    most = min(max_num_seqs, _MOST_ROWS)
    return (*(size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most), most)
