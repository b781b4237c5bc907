"""The protocol of training engines.

A training engine holds one model, sharded over its ranks. It does not depend on the algorithm: callers pass a
loss, and a batch with the columns that the loss needs.
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
from tandem.models.routing import Mixtures
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto

JUDGED = "judged_tokens"
"""The name of the column that marks the tokens to score (ragged bool).

Without this column, each sequence's last token is scored.
"""
REFERENCE = "ref_hidden"
"""The name of the column with the reference policy's last hidden states, ragged (T, D).

The exact KL needs this column.
"""


@dataclass(frozen=True, slots=True)
class Counts:
    """The denominators of a loss, counted over the global mini-batch (all ranks and micro-batches).

    Attributes:
        tokens: number of response tokens (true entries of `response_mask`).
        sequences: number of sequences with at least one response token. The means of the loss exclude empty
            responses and fully rejected responses. `response_length/mean` and `reward/mean` include them.
    """

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """The rule that splits one rank's shard of a mini-batch into micro-batches.

    Set at most one of the two attributes. If both are None, the shard is one micro-batch.

    Attributes:
        max_samples: sequences per micro-batch.
        max_tokens: tokens per micro-batch and rank (dynamic batching, balanced).
    """

    max_samples: int | None = None
    max_tokens: int | None = None

    def over(self, ranks: int) -> MicroBatching:
        """Return the rule for micro-batches whose tokens are divided among `ranks` ranks."""
        return self if self.max_tokens is None else MicroBatching(max_tokens=self.max_tokens * ranks)


class LossFn(Protocol):
    """The protocol of a loss: a function that computes a micro-batch's term of the mini-batch's loss.

    `outputs` names the model outputs that the loss needs ("log_probs", "entropy", "ref_kl", "values",
    "scores"). `columns` names the ragged or dense columns of the batch that the loss needs.

    Outputs and ragged columns are passed as flat tensors over the tokens of the micro-batch. These tensors
    are aligned with `offsets` (B+1 numbers, on the same device as the tensors). If a row contains several
    sequences, `offsets` has one entry per sequence instead of one per row. Dense columns are passed with one
    entry per row.

    `counts` are global. So the loss of the mini-batch is the sum of the returned scalars over all
    micro-batches of all ranks. A ghost micro-batch (a placeholder on a rank without rows) has a response mask
    that is all false.
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
    """The protocol of a loss that leaves out tokens which are known only after the forward pass.

    The `counts` passed to such a loss include the tokens that are left out, so the loss is divided by too
    large a number.
    """

    def recount(self, metrics: Metrics, counts: Counts) -> float:
        """Return the factor by which the loss and its gradient must be multiplied.

        The factor is the same on every rank. It is 1 if no token was left out, and 0 if all tokens were left
        out. The engine calls this method once per mini-batch, before the optimizer step.

        Args:
            metrics: the metrics of the loss over all micro-batches and ranks. Metrics that are divided by the
                same counts are multiplied by the factor in place.
            counts: the denominators that the loss used.
        """


@runtime_checkable
class TrainEngine(Protocol):
    """The protocol of a training engine.

    All methods are collective: every rank of the engine must call them. Each method leaves the model sharded
    when it ends.
    """

    version: int
    """The number of optimizer steps taken."""
    share: Share
    """The shard of a batch's rows that this rank processes."""
    unshards: bool
    """Whether `unsharded` can return the module.

    False if the ranks use tensor or pipeline parallelism, or if the model has adapters.
    """
    kernels: Kernels
    """The kernels that compute the layers and the log-probs."""
    mixtures: Mixtures
    """The mixtures of experts of the model."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the forward and backward pass, and of the unsharded weights."""

    @property
    def output_dtype(self) -> torch.dtype:
        """Return the dtype of outputs: fp32, or fp64 if the model computes in fp64."""

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
        score of the sequence, and all other entries are zero. If the batch has the column `judged_tokens`,
        the tokens that it marks have scores instead.

        Args:
            batch: this rank's rows. If a policy's batch has the column `routed_experts`, these experts
                compute the tokens.
            outputs: names of the outputs to compute.
            micro: the rule that splits the rows into micro-batches.
            adapter: False: use the base model without its adapters. The result is bit for bit the same as
                that of the base model.
            temperature: temperature of a policy. None: the policy's configured temperature.
        """

    def train_step(self, batch: DataProto, loss: LossFn, *, micro: MicroBatching) -> Metrics:
        """Take one optimizer step over a mini-batch, of which `batch` is this rank's shard.

        The returned metrics are already reduced over ranks. They are the metrics of the loss, grad_norm and
        lr. A column `routed_experts` has the same effect as in `forward`.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite. No weight has changed.
        """

    def unsharded(self) -> AbstractContextManager[nn.Module]:
        """Return a context manager that yields the transformers model with whole weights in compute dtype.

        Do not call `train_step` inside this context.

        Raises:
            EngineError: the model is split by tensor or pipeline parallelism, or has adapters; see
                `unshards`.
        """

    def weights(
        self, *, dtype: torch.dtype | None = None, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face name and the whole tensor of each weight.

        Persistent buffers are weights too. Each tensor is valid only until you request the next one. Tied
        weights are yielded once. The order is the same on all ranks. Adapters are merged into their base
        weights.

        Args:
            dtype: dtype of the tensors; buffers have at least fp32. None: the dtype of the master weights.
            names: yield only these weights. None: all weights.
        """

    @property
    def weight_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the tensors that `weights` yields, in the same order."""

    def digest(self, dtype: torch.dtype | None = None) -> Digest:
        """Return the digest of the whole weights, which is the same on all ranks.

        The digest is computed from the shards, without gathering them.

        Args:
            dtype: dtype to which the weights are converted for the digest. None: the compute dtype, as in
                `unsharded`.
        """

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int, *, whole: bool = True) -> None:
        """Load a stream of names and whole tensors, as yielded by `weights`. Each rank copies its shards.

        Args:
            stream: pairs of Hugging Face name and whole tensor.
            version: version of the engine from which the weights come.
            whole: True: the stream must contain every weight. False: weights that are not in the stream do
                not change.

        Raises:
            EngineError: a weight is missing, unknown, given twice or of another shape, or the model has
                adapters.
        """

    def reset_optimizer(self) -> None:
        """Reset the moments of the optimizer.

        The weights, the version and the position in the learning-rate schedule do not change.
        """

    def output_head(self) -> Tensor:
        """Return a policy's whole output embedding, (V, D) in the compute dtype, on every rank.

        If the output layer has a bias, it is the first of eight more columns; see `with_bias` in logits.py.
        This is not supported with pipeline parallelism.
        """

    def hold_reference_head(self, head: Tensor) -> None:
        """Store the `output_head` of the reference policy for the output "ref_kl"."""

    def take_collectives(self) -> tuple[float, int]:
        """Return the seconds and bytes of this rank's collectives since the last call.

        See `CollectiveMeter`.
        """

    def save(self, path: Path) -> None:
        """Save this model's shards, optimizer state and version into the folder `path`.

        The version also determines the position in the learning-rate schedule.
        """

    def stage(self, path: Path) -> Callable[[], None]:
        """Copy the state that `save` would write to the host.

        Returns:
            A function that writes the copy to disk. Call this function once on every rank, on any thread.
            Meanwhile the engine can be used.
        """

    def load(self, path: Path) -> None: ...

    def offload(self) -> None:
        """Move parameters and optimizer state to the host, as set in the config. Use this between phases."""

    def onload(self, *, optimizer: bool) -> None:
        """Move offloaded parameters back to the device. With `optimizer`, also move the optimizer state."""

    def take_transfers(self) -> dict[str, tuple[float, int]]:
        """Return the seconds and bytes of offloading and onloading state since the last call.

        The result maps "offload" and "onload" to (seconds, bytes).
        """

    def state_info(self) -> dict[str, Any]:
        """Return the number of parameters, and the bytes of parameters and optimizer state on each device."""
