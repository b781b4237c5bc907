"""The protocol of training engines.

A training engine holds one model, sharded over its ranks. It knows nothing about algorithms: callers pass a
loss together with the columns that the loss needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tandem.engines.weight_sync import Digest
from tandem.models.kernels import Kernels
from tandem.models.parallel import Share
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto

JUDGED = "judged_tokens"
"""Name of the column that marks the tokens to score (ragged bool).

Without this column, each sequence's last token is scored.
"""
REFERENCE = "ref_hidden"
"""Name of the column with the reference policy's last hidden states, ragged (T, D), for the exact KL."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The denominators of a loss, counted over the global mini-batch (all ranks and micro-batches).

    Attributes:
        tokens: number of response tokens (true entries of `response_mask`).
        sequences: number of sequences with at least one response token. An empty response, or a response that
            is rejected as a whole, counts in no mean of the loss. `response_length/mean` and `reward/mean` do
            count it.
    """

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """The rule that cuts one rank's share of a mini-batch into micro-batches.

    Set at most one of the two attributes. If both are None, the share is one micro-batch.

    Attributes:
        max_samples: sequences per micro-batch.
        max_tokens: tokens per micro-batch and rank (dynamic batching, balanced).
    """

    max_samples: int | None = None
    max_tokens: int | None = None

    def over(self, ranks: int) -> MicroBatching:
        """Return the rule for micro-batches whose tokens are shared by this number of ranks."""
        return self if self.max_tokens is None else MicroBatching(max_tokens=self.max_tokens * ranks)


class LossFn(Protocol):
    """A function that computes the loss of one micro-batch as its share of the mini-batch's loss.

    `outputs` names the model outputs that the loss needs ("log_probs", "entropy", "ref_kl", "values",
    "scores"). `columns` names ragged or dense columns of the batch.

    Outputs and ragged columns arrive as flat tensors over the tokens of the micro-batch. They are aligned
    with `offsets` (B+1 numbers, on the same device as the tensors). If a row holds several sequences,
    `offsets` are those of the sequences. Dense columns arrive with one entry per row.

    The sum of the returned scalars over all micro-batches of all ranks is the loss, because `counts` are
    global. A ghost micro-batch (a placeholder on a rank without rows) has a response mask that is all false.
    """

    @property
    def outputs(self) -> frozenset[str]: ...

    @property
    def columns(self) -> frozenset[str]: ...

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], offsets: Tensor, counts: Counts
    ) -> tuple[Tensor, Metrics]: ...


@runtime_checkable
class RecountingLoss(Protocol):
    """A loss that leaves out tokens that only the forward pass can identify.

    The `counts` of such a loss are too large.
    """

    def recount(self, metrics: Metrics, counts: Counts) -> float:
        """Return the factor by which the loss and its gradient must be multiplied.

        The factor is the same on every rank. It is 1 if nothing was left out, and 0 if everything was left
        out. The engine calls this once per mini-batch, before the optimizer steps.

        Args:
            metrics: the loss's own metrics over all micro-batches and ranks. The metrics that the factor
                affects are multiplied by it in place.
            counts: the denominators that the loss used.
        """


@runtime_checkable
class TrainEngine(Protocol):
    """The interface of a training engine.

    All methods are collective: every rank of the engine must call them. Each method leaves the model sharded
    when it ends.
    """

    version: int
    """Number of optimizer steps taken."""
    share: Share
    """The rows of a batch that this rank takes."""
    unshards: bool
    """Whether `unsharded` can return the module.

    It cannot if the ranks use tensor or pipeline parallelism, or if the model has adapters.
    """
    kernels: Kernels
    """The kernels that compute the layers and the log-probs."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the type of the forward and backward pass, and of the unsharded weights."""

    @property
    def output_dtype(self) -> torch.dtype:
        """Return the type of outputs: fp32, or fp64 if the model computes in fp64."""

    def forward(
        self,
        batch: DataProto,
        *,
        outputs: frozenset[str],
        micro: MicroBatching,
        adapter: bool = True,
        temperature: float | None = None,
    ) -> DataProto:
        """Run the model without gradients and return each output as a ragged column aligned with `tokens`.

        Outputs are fp32, or fp64 if the model computes in fp64. In log_probs, entropy and values, entry t
        belongs to token t given the tokens before it, and entry 0 is zero. In scores, the last entry is the
        score of the sequence and the others are zero, unless the column `judged_tokens` marks other tokens to
        score.

        Args:
            batch: this rank's rows.
            outputs: names of the outputs to compute.
            micro: rule for the micro-batches.
            adapter: False: use the base model without its adapters. The result is the base model's, bit for
                bit.
            temperature: temperature of a policy. None: the policy's own.
        """

    def train_step(self, batch: DataProto, loss: LossFn, *, micro: MicroBatching) -> Metrics:
        """Take one optimizer step over this rank's share of a mini-batch.

        The returned metrics are already reduced over ranks. They hold the loss's own metrics, grad_norm and
        lr.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite. No weight has changed.
        """

    def unsharded(self) -> AbstractContextManager[nn.Module]:
        """Return a context that gives the transformers model with whole weights in the compute dtype.

        Do not call `train_step` inside this context.

        Raises:
            EngineError: no rank has all layers whole, or the model has adapters; see `unshards`.
        """

    def weights(
        self, *, dtype: torch.dtype | None = None, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors by Hugging Face name.

        Each tensor is valid only until you ask for the next one. Tied weights are yielded once. The order is
        the same on all ranks. Adapters are merged into their base weights.

        Args:
            dtype: type of the tensors. None: the master precision.
            names: yield only these weights. None: all weights.
        """

    @property
    def weight_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the tensors that `weights` yields, in the same order."""

    def digest(self, dtype: torch.dtype | None = None) -> Digest:
        """Return the digest of the whole weights; it is the same on all ranks.

        The digest is computed from the shards, without gathering them.

        Args:
            dtype: type in which the weights are digested. None: the type that `unsharded` gives.
        """

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int, *, whole: bool = True) -> None:
        """Load whole tensors by Hugging Face name, as `weights` yields them. Each rank keeps its shards.

        Args:
            stream: names and tensors.
            version: version of the engine that the weights come from.
            whole: True: the stream must hold every weight. False: weights that are not in the stream stay as
                they are.

        Raises:
            EngineError: a weight is missing, unknown, given twice or of another shape, or the model has
                adapters.
        """

    def reset_optimizer(self) -> None:
        """Reset the optimizer's moments.

        Weights, version and the position in the schedule stay.
        """

    def output_head(self) -> Tensor:
        """Return a policy's whole output embedding, (V, D) in the compute dtype, on every rank.

        This does not work for a model in pipeline stages.
        """

    def hold_reference_head(self, head: Tensor) -> None:
        """Store the whole output embedding of the reference policy. The policy's output "ref_kl" needs it."""

    def take_collectives(self) -> tuple[float, int]:
        """Return seconds and bytes of this rank's collectives since the last call; see `CollectiveMeter`."""

    def save(self, path: Path) -> None:
        """Save this model's shards, optimizer state and version into the folder `path`.

        The version gives the position in the schedule.
        """

    def stage(self, path: Path) -> Callable[[], None]:
        """Copy what `save` would write now to the host.

        Returns:
            A function that writes the copy. Call it once on every rank, on any thread. The engine can go on
            meanwhile.
        """

    def load(self, path: Path) -> None: ...

    def offload(self) -> None:
        """Move to the host what the config says (parameters, optimizer state). Used between phases."""

    def onload(self, *, optimizer: bool) -> None:
        """Move offloaded parameters back to the device, and with `optimizer` also the optimizer's state."""

    def take_transfers(self) -> dict[str, tuple[float, int]]:
        """Return seconds and bytes of the copies of this rank's state since the last call.

        The keys are "offload" and "onload".
        """

    def state_info(self) -> dict[str, Any]:
        """Return the size and place of the state: number of parameters, bytes per kind and device."""
