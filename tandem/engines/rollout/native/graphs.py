"""A runner that records decode steps as CUDA graphs.

A decode step of a small batch consists of hundreds of short kernels. The host needs more time to launch these
kernels than the device needs to run them. A graph launches all kernels at once, but always with the same
addresses and shapes. So there are graphs for a few batch sizes. The input of a step is copied into fixed
buffers and padded to the next of these sizes. Then the graph of this size is replayed. Padding rows write
nothing (slot -1), and their logits are dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tandem.engines.rollout.native.attention import Attention
from tandem.engines.rollout.native.paged import StepInput
from tandem.engines.rollout.native.runner import Runner
from tandem.engines.rollout.native.weights import Place, places

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""A function that records work on fixed buffers and returns a function that repeats the work.

The work may run during the recording.
"""

_MOST_ROWS = 512  # with more rows, the kernels run longer than their launches take


class CudaCapture:
    """A recorder of CUDA graphs that share one memory pool.

    Only one graph may run at a time. Each graph overwrites the results of the other graphs in the pool.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()  # compiles kernels and allocates workspaces, which is not allowed in a capture
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


_FILLED = ("ids_T", "positions_T", "levels_T", "lengths_S")


def _buffers(rows: int, max_blocks: int, groups: int, device: torch.device, max_length: int) -> StepInput:
    """Create the fixed input buffers for a decode step of `rows` sequences. All rows are padding rows."""
    index = torch.arange(rows + 1, device=device)
    return StepInput(
        ids_T=torch.zeros_like(index[1:]),
        positions_T=torch.zeros_like(index[1:]),
        levels_T=torch.zeros_like(index[1:]),
        starts_S1=index.int(),
        lengths_S=torch.ones_like(index[1:], dtype=torch.int32),
        logits_L=index[:-1],
        slots_GT=tuple(torch.full_like(index[1:], -1) for _ in range(groups)),
        tables_GSB=tuple(torch.zeros(groups, rows, max_blocks, dtype=torch.int32, device=device)),
        max_query=1,
        max_length=max_length,
    )


@dataclass(eq=False)
class GraphedRunner:
    """A wrapper around a runner that uses CUDA graphs for decode steps. Other steps run without graphs.

    A graph is captured when its size is first needed. The graph of the largest size is captured first,
    because the other graphs share its memory. If a capture fails, a warning is logged, and all further steps
    run without graphs.

    A graph stores addresses. It is valid as long as the weights and the KV cache stay at the same addresses.
    The content of this memory may change.

    Args:
        runner: A runner that never waits for the device in a decode step.
        attention: The attention of the steps, which must not wait for the device either.
        max_num_seqs: The maximum number of sequences of a step. Steps with more than 512 sequences are not
            captured.
        max_blocks: The number of blocks of the longest sequence.
        capture: The function that records work. By default it records CUDA graphs.

    Attributes:
        replays: A dict from batch size to the function that replays the graph of this size.
    """

    runner: Runner
    attention: Attention
    max_num_seqs: int
    max_blocks: int
    capture: Capture = field(default_factory=CudaCapture)

    def __post_init__(self) -> None:
        self.sizes = graph_sizes(self.max_num_seqs)
        cache = self.attention.cache
        longest, groups = self.max_blocks * cache.block_size, len(cache.groups.windows)
        self._buffers = _buffers(self.sizes[-1], self.max_blocks, groups, self.runner.device, longest)
        self.replays: dict[int, Work] = {}
        self._captured_over: tuple[Place, ...] = ()
        self._logits_LV: Tensor | None = None

    def is_over(self, runner: Runner, attention: Attention) -> bool:
        """Return whether the graphs are valid for this runner and this attention.

        They are valid if all tensors that the graphs read and write still have the same addresses.
        """
        if runner is not self.runner or attention is not self.attention:
            return False
        return not self.replays or self._captured_over == self._places()

    def _places(self) -> tuple[Place, ...]:
        return places((*self.runner.reads(), *self.attention.cache.parts))

    @torch.inference_mode()
    def prepare(self, sizes: Collection[int]) -> None:
        """Capture graphs of the given sizes in advance. Sizes for which graphs are not used are skipped."""
        for size in sorted(sizes, reverse=True):
            if size in self.sizes:
                self._replay(size)

    @torch.inference_mode()
    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        """Compute the logits of a step (see `Runner`).

        The logits of a decode step are valid until the next step. If `logits_L` has one entry per token of
        the step, the entries must be all tokens in order.
        """
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
        """Copy the step into the first rows of the buffers, and fill the padding rows.

        The padding rows keep the ids, positions, levels and tables of an earlier step, because these values
        do not matter.
        """
        held, rows = self._buffers, len(step.ids_T)
        for name in _FILLED:
            getattr(held, name)[:rows].copy_(getattr(step, name))
        for slots_T, given_T in zip(held.slots_GT, step.slots_GT, strict=True):
            slots_T[:rows].copy_(given_T)
            slots_T[rows:size].fill_(-1)
        for tables_SB, given_SB in zip(held.tables_GSB, step.tables_GSB, strict=True):
            tables_SB[:rows, : given_SB.shape[1]].copy_(given_SB)
        held.lengths_S[rows:size].fill_(1)

    def _replay(self, size: int) -> Work | None:
        """Return a function that replays the graph of this size, or None if the capture fails."""
        for needed in (self.sizes[-1], size):
            if needed in self.replays:
                continue
            if not self.replays:
                self._captured_over = self._places()
            # The buffers contain no step yet, so the work may safely run twice.
            for slots_T in self._buffers.slots_GT:
                slots_T.fill_(-1)
            try:
                self.replays[needed] = self.capture(self._work(needed))
            except RuntimeError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                warnings.warn(
                    f"decoding runs without CUDA graphs and is slower, because a capture failed: {reason}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                self.sizes = ()
                self.replays.clear()
                return None
        return self.replays[size]

    def _work(self, size: int) -> Work:
        held = self._buffers
        parts: dict[str, Any] = {name: getattr(held, name)[:size] for name in (*_FILLED, "logits_L")}
        for name in ("slots_GT", "tables_GSB"):
            parts[name] = tuple(each[:size] for each in getattr(held, name))
        step = replace(held, starts_S1=held.starts_S1[: size + 1], **parts)

        def work() -> None:
            logits_LV = self.runner.forward(step, self.attention)
            if self._logits_LV is None:  # in the first run, which is not captured
                self._logits_LV = logits_LV.new_empty(len(held.ids_T), logits_LV.shape[1])
            # The logits are copied. Otherwise the outputs of all graphs would stay allocated, which needs
            # gigabytes.
            self._logits_LV[:size].copy_(logits_LV)

        return work


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes for which graphs are captured, in ascending order.

    The largest size is the smaller of `max_num_seqs` and 512. The other sizes are 1, 2, 4, 8 and all
    multiples of 16 below the largest size.
    """
    most = min(max_num_seqs, _MOST_ROWS)
    return (*(size for size in (1, 2, 4, 8, *range(16, most, 16)) if size < most), most)
