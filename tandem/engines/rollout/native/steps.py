"""The forward of an engine's steps across weight updates: the runner and the graphs of its decode steps."""

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
    """The forward of an engine's steps.

    Graphs stay valid after an update and a sleep if the weights and the cache keep their addresses. If they
    do not, graphs of the same sizes are captured again before the first step, not in the middle of
    generation.

    Attributes:
        make: Creates a runner over a module's weights, with `copies` of them or without (see `make_runner`).
        graphs: Whether decode steps are captured and replayed.
        max_num_seqs: The most sequences of a step.
        max_blocks: The blocks of the longest sequence.
        runner: The runner over the current weights. None without weights.
        moved: Whether weights or cache may have other addresses than when the graphs were last used.
    """

    make: Callable[..., Runner]
    graphs: bool
    max_num_seqs: int
    max_blocks: int
    runner: Runner | None = None
    moved: bool = False
    _released: Runner | None = None  # its weights are freed, and it waits for new ones
    _graphed: GraphedRunner | None = None
    _captured: set[int] = field(default_factory=set)

    def runner_of(self, module: nn.Module, copies: Callable[[Runner], bool]) -> Runner:
        """Return a runner over the module's current weights.

        This is the existing runner if the weights belong to its model, otherwise a new one.

        Args:
            module: The model.
            copies: Returns whether a runner should have copies of its weights. It is called for runners that
                can have them.

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
        """Compute with this runner, which `runner_of` returned, from now on."""
        if runner not in (self.runner, self._released):
            self.drop_graphs()
        self.runner, self._released, self.moved = runner, None, True

    def release_weights(self) -> None:
        """Drop the weights. Graphs stay if the memory of the weights will keep its addresses."""
        if self.runner is not None and self.runner.release_weights():
            self._released = self.runner
        elif self.runner is not None:
            self.drop_graphs()
        self.runner = None

    def drop_graphs(self) -> None:
        """Free the graphs. Those that are needed again are captured before the next step."""
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
