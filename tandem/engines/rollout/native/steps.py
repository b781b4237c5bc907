"""What computes an engine's steps: the runner over its weights, and the graphs of its decode steps, from one
version of the weights to the next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from tandem.engines.rollout.native.attention import Attention
from tandem.engines.rollout.native.fused import FusedRunner
from tandem.engines.rollout.native.graphs import GraphedRunner
from tandem.engines.rollout.native.paged import StepInput
from tandem.engines.rollout.native.runner import Runner, RunnerName, make_runner
from tandem.engines.rollout.native.split import LayerSplit


class Steps:
    """The forward of an engine's steps.

    Graphs outlive an update and a sleep where the weights and the cache are then where they were. Where they
    are not, those of the sizes that were captured before are captured anew before the first step, not in
    the middle of generation.

    Args:
        name, max_length, split: see `make_runner`.
        graphs: whether decode steps are captured and replayed.
        max_num_seqs: sequences of a step, at most.
        max_blocks: of the longest sequence.

    Attributes:
        runner: over the weights there are now; None without weights.
    """

    def __init__(
        self,
        name: RunnerName,
        max_length: int,
        split: LayerSplit,
        *,
        graphs: bool,
        max_num_seqs: int,
        max_blocks: int,
    ) -> None:
        self.runner: Runner | None = None
        self.graphs = graphs
        self._name: RunnerName = name
        self._max_length, self._split = max_length, split
        self._max_num_seqs, self._max_blocks = max_num_seqs, max_blocks
        self._resting: Runner | None = None  # waits for weights
        self._graphed: GraphedRunner | None = None
        self._moved = False  # whether weights or cache may lie elsewhere than when the graphs were last used
        self._captured: frozenset[int] = frozenset()

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
        make = partial(make_runner, self._name, module, self._max_length, self._split)
        made = make(copies=False)
        return make(copies=True) if isinstance(made, FusedRunner) and copies(made) else made

    def use(self, runner: Runner) -> None:
        """Computes from now on by a runner of `runner_of`."""
        if runner not in (self.runner, self._resting):
            self.drop_graphs()
        self.runner, self._resting, self._moved = runner, None, True

    def rest(self) -> None:
        """Gives up the weights. Graphs stay if the memory of the weights will be where it was."""
        if self.runner is None:
            return
        if self.runner.rest():
            self._resting = self.runner
        else:
            self.drop_graphs()
        self.runner = None

    def drop_graphs(self) -> None:
        """Frees the graphs, of which those that are needed again are captured before the next step."""
        if self._graphed is not None:
            self._captured |= self._graphed.captured
        self._graphed = None

    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        """See `Runner`; the logits of a decode step are good until the next."""
        assert self.runner is not None
        if not self.graphs:
            return self.runner.forward(step, attention)
        graphed = self._graphed
        if graphed is not None and self._moved and not graphed.is_over(self.runner, attention):
            self.drop_graphs()
        self._moved = False
        if self._graphed is None:
            self._graphed = GraphedRunner(self.runner, attention, self._max_num_seqs, self._max_blocks)
            self._graphed.prepare(self._captured)
        return self._graphed.forward(step, attention)

    def cache_taken(self) -> None:
        """Says that the cache has its memory again."""
        self._moved = True
