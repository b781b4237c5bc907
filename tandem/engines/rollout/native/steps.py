"""A class that keeps an engine's runner and CUDA graphs valid across weight updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from tandem.engines.rollout.native.attention import Attention
from tandem.engines.rollout.native.fused import FusedRunner
from tandem.engines.rollout.native.graphs import GraphedRunner
from tandem.engines.rollout.native.paged import StepInput
from tandem.engines.rollout.native.runner import Runner


@dataclass(eq=False)
class Steps:
    """The forward of an engine's steps: the runner, and the graphs of the runner's decode steps.

    Graphs stay valid after an update or a sleep if the weights and the KV cache keep their addresses.
    Otherwise graphs of the same sizes are captured again before the next step, and not in the middle of
    generation.

    Attributes:
        make: A function that creates a runner for a module. `copies` says whether it copies the weights (see
            `make_runner`).
        graphs: Whether decode steps are captured and replayed.
        max_num_seqs: The maximum number of sequences of a step.
        max_blocks: The number of blocks of the longest sequence.
        runner: The runner with the current weights. None if there are no weights.
        moved: Whether the addresses of the weights or of the cache may have changed since the graphs were
            last used.
    """

    make: Callable[..., Runner]
    graphs: bool
    max_num_seqs: int
    max_blocks: int
    runner: Runner | None = None
    moved: bool = False
    _released: Runner | None = None  # a runner whose weights are freed and that waits for new weights
    _graphed: GraphedRunner | None = None
    _captured: set[int] = field(default_factory=set)

    def runner_of(self, module: nn.Module, copies: Callable[[Runner], bool]) -> Runner:
        """Return a runner with the module's current weights.

        This is the existing runner if the weights belong to the runner's model, otherwise a new runner.

        Args:
            module: The model.
            copies: A function that returns whether a runner should copy the weights. It is called only for
                runners that can have copies.

        Raises:
            EngineError: See `make_runner`.
            ConfigError: See `make_runner`.
        """
        for runner in (self.runner, self._released):
            if runner is not None and runner.renew(module):
                return runner
        made = self.make(module, copies=False)
        return self.make(module, copies=True) if isinstance(made, FusedRunner) and copies(made) else made

    def use(self, runner: Runner) -> None:
        """Use this runner, a result of `runner_of`, for all further steps."""
        if runner not in (self.runner, self._released):
            self.drop_graphs()
        self.runner, self._released, self.moved = runner, None, True

    def release_weights(self) -> None:
        """Drop the weights. The graphs are kept if the memory of the weights will keep its addresses."""
        if self.runner is not None and self.runner.release_weights():
            self._released = self.runner
        elif self.runner is not None:
            self.drop_graphs()
        self.runner = None

    def drop_graphs(self) -> None:
        """Free the graphs. Graphs of the same sizes are captured again before the next step."""
        if self._graphed is not None:
            self._captured.update(self._graphed.replays)
        self._graphed = None

    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        """Compute the logits of a step (see `Runner`).

        The logits of a decode step are valid until the next step.
        """
        assert self.runner is not None
        if not self.graphs:
            return self.runner.forward(step, attention)
        graphed, moved, self.moved = self._graphed, self.moved, False
        if graphed is not None and moved and not graphed.is_over(self.runner, attention):
            self.drop_graphs()
        if self._graphed is None:
            self._graphed = GraphedRunner(self.runner, attention, self.max_num_seqs, self.max_blocks)
            self._graphed.prepare(self._captured)
        return self._graphed.forward(step, attention)
