"""What computes an engine's steps: the runner over its weights, and the graphs of its decode steps, from one
version of the weights to the next."""

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

    Graphs outlive an update and a sleep where the weights and the cache are then where they were. Where they
    are not, those of the sizes that were captured before are captured anew before the first step, not in
    the middle of generation.

    Attributes:
        make: makes a runner over a module's weights, see `make_runner`, with `copies` of them or without.
        graphs: whether decode steps are captured and replayed.
        max_num_seqs: sequences of a step, at most.
        max_blocks: of the longest sequence.
        runner: over the weights there are now; None without weights.
        moved: whether weights or cache may lie elsewhere than when the graphs were last used.
    """

    make: Callable[..., Runner]
    graphs: bool
    max_num_seqs: int
    max_blocks: int
    runner: Runner | None = None
    moved: bool = False
    _resting: Runner | None = None  # waits for weights
    _graphed: GraphedRunner | None = None
    _captured: set[int] = field(default_factory=set)

    def runner_of(self, module: nn.Module, copies: Callable[[Runner], bool]) -> Runner:
        """A runner over the module's weights as they are now: the one there is if they are of its model, else
        another.

        Args:
            copies: whether a runner should rather have copies of its weights; asked of those that can.

        Raises:
            EngineError, ConfigError: see `make_runner`.
        """
        for runner in (self.runner, self._resting):
            if runner is not None and runner.renew(module):
                return runner
        made = self.make(module, copies=False)
        return self.make(module, copies=True) if isinstance(made, FusedRunner) and copies(made) else made

    def use(self, runner: Runner) -> None:
        """Compute from now on by a runner of `runner_of`."""
        if runner not in (self.runner, self._resting):
            self.drop_graphs()
        self.runner, self._resting, self.moved = runner, None, True

    def rest(self) -> None:
        """Give up the weights. Graphs stay if the memory of the weights will be where it was."""
        if self.runner is not None and self.runner.rest():
            self._resting = self.runner
        elif self.runner is not None:
            self.drop_graphs()
        self.runner = None

    def drop_graphs(self) -> None:
        """Free the graphs, of which those that are needed again are captured before the next step."""
        if self._graphed is not None:
            self._captured.update(self._graphed.replays)
        self._graphed = None

    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        """See `Runner`; the logits of a decode step are good until the next."""
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
