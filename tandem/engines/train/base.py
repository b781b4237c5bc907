"""The protocol of training engines. An engine holds one model, sharded over its ranks, and knows
nothing of algorithms: a loss is handed to it with the columns it needs."""

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
"""The column of the tokens whose scores are asked for, ragged bool; without it each sequence's last."""
REFERENCE = "ref_hidden"
"""The column of the reference policy's last hidden states, ragged (T, D), that a policy is compared with."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Denominators of a loss: those of the global mini-batch, over all ranks and micro-batches.

    Attributes:
        tokens: response tokens (true entries of `response_mask`).
        sequences: sequences with at least one response token; an empty response, or one that is rejected
            as a whole, is in no mean. `response_length/mean` and `reward/mean` count it.
    """

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """The cut of one rank's share into micro-batches; exactly one of the two is set, or none for one
    micro-batch.

    Attributes:
        max_samples: sequences per micro-batch.
        max_tokens: tokens per micro-batch and rank (dynamic batching, balanced).
    """

    max_samples: int | None = None
    max_tokens: int | None = None

    def over(self, ranks: int) -> MicroBatching:
        """The rule for micro-batches whose tokens so many ranks share."""
        return self if self.max_tokens is None else MicroBatching(max_tokens=self.max_tokens * ranks)


class LossFn(Protocol):
    """A micro-batch's share of a mini-batch's loss.

    `outputs` names model outputs ("log_probs", "entropy", "ref_kl", "values", "scores"), `columns` ragged or
    dense columns of the batch. Outputs and ragged columns arrive as flat tensors over the micro-batch's
    tokens, aligned with `offsets` (B+1, on the tensors' device), those of the sequences where a row holds
    several; dense ones with an entry per row. Summed over all micro-batches of all ranks the returned scalars
    are the loss, because `counts` are global. Ghost micro-batches have a false response mask throughout.
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
    """A loss that leaves tokens out which only the forward tells, so that `counts` are too large."""

    def recount(self, metrics: Metrics, counts: Counts) -> float:
        """The factor by which the loss and its gradient are to be multiplied, the same on every rank; 1 if
        nothing was left out, 0 if all was. Called once a mini-batch, before the optimizer steps.

        Args:
            metrics: the loss's own, over all micro-batches and ranks; those that the factor concerns are
                multiplied by it in place.
            counts: what the loss was divided by.
        """


@runtime_checkable
class TrainEngine(Protocol):
    """All methods are collective over the engine's ranks; each ends with the model resharded."""

    version: int
    """Optimizer steps taken."""
    share: Share
    """Which rows this rank takes."""
    unshards: bool
    """Whether `unsharded` gives the module; not where ranks split its layers, or have some of them, nor with
    adapters."""
    kernels: Kernels
    """What computes its layers and log-probs."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of forward and backward, and of the unsharded weights."""

    @property
    def output_dtype(self) -> torch.dtype:
        """The type of outputs: fp32, or fp64 where the model computes in fp64."""

    def forward(
        self,
        batch: DataProto,
        *,
        outputs: frozenset[str],
        micro: MicroBatching,
        adapter: bool = True,
        temperature: float | None = None,
    ) -> DataProto:
        """Without gradient: each output as a ragged column aligned with `tokens`, fp32, or fp64 where
        the model computes in fp64. Entry t of log_probs, entropy, values concerns token t given the
        tokens before it, entry 0 is zero; of scores, the last entry is the sequence's, the rest zero, unless
        `judged_tokens` says where else there are some.

        Args:
            adapter: false: what the base model gives, bit for bit, whose adapters are trained.
            temperature: of a policy; None: its own.
        """

    def train_step(self, batch: DataProto, loss: LossFn, *, micro: MicroBatching) -> Metrics:
        """One optimizer step over this rank's share of a mini-batch. Metrics are already reduced
        over ranks and hold, besides the loss's own, grad_norm and lr.

        Raises:
            NonFiniteError: the loss or gradient norm is not finite; no weight has changed.
        """

    def unsharded(self) -> AbstractContextManager[nn.Module]:
        """The transformers model with whole, compute-dtype weights; no train_step inside.

        Raises:
            EngineError: no rank has all layers whole, or there are adapters; see `unshards`.
        """

    def weights(
        self, *, dtype: torch.dtype | None = None, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by Hugging Face name, each only until the next is asked for; tied ones once; the same
        order on all ranks. Adapters are merged into the weights they stand beside.

        Args:
            dtype: None gives master precision.
            names: only these; None gives all.
        """

    @property
    def weight_shapes(self) -> dict[str, torch.Size]:
        """The shapes of the tensors that `weights` gives, in their order."""

    def digest(self, dtype: torch.dtype | None = None) -> Digest:
        """The digest of the whole weights in `dtype` (None: as `unsharded` gives them), from the shards,
        without gathering them; the same on all ranks."""

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int, *, whole: bool = True) -> None:
        """Takes over full tensors by Hugging Face name, as `weights` gave them, each rank its shards.

        Args:
            version: that of the engine they come from.
            whole: whether the stream must hold every weight; the rest of a part stays as it is.

        Raises:
            EngineError: a name of this model that is missing, one that is unknown or comes twice, a
                tensor of another shape; a model with adapters.
        """

    def reset_optimizer(self) -> None:
        """Forgets the optimizer's moments; weights, version and so the schedule stay."""

    def output_head(self) -> Tensor:
        """(V, D), in compute dtype: a policy's output embedding, whole, on every rank; not of a model in
        stages."""

    def hold_reference_head(self, head: Tensor) -> None:
        """Takes the whole output embedding of the reference policy, for the policy's output "ref_kl"."""

    def take_collectives(self) -> tuple[float, int]:
        """Seconds and bytes of this rank's collectives since the last call; see `CollectiveMeter`."""

    def save(self, path: Path) -> None:
        """This model's shards, optimizer, schedule and version into the folder `path`."""

    def stage(self, path: Path) -> Callable[[], None]:
        """A copy on the host of what `save` writes, as it is now.

        Returns:
            what writes it, once on every rank, on any thread, while the engine goes on.
        """

    def load(self, path: Path) -> None: ...

    def offload(self) -> None:
        """Moves what the config says (parameters, optimizer state) to the host, between phases."""

    def onload(self, *, optimizer: bool) -> None:
        """Brings offloaded parameters back, and with `optimizer` its state too."""

    def take_transfers(self) -> dict[str, tuple[float, int]]:
        """Seconds and bytes of the copies of this rank's state since the last call, by "offload" and
        "onload"."""

    def state_info(self) -> dict[str, Any]:
        """The place and size of the state: parameters, bytes per kind and device."""
