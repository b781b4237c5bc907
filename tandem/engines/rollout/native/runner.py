"""The protocol of runners, which compute the logits of a step, and a factory that creates a runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from torch import Tensor, device, dtype, nn

from tandem.config.model import PLAIN_DECODERS
from tandem.engines.rollout.native.attention import Attention
from tandem.engines.rollout.native.fused import FusedRunner, why_not_fused
from tandem.engines.rollout.native.module import ModuleRunner
from tandem.engines.rollout.native.paged import LayerShape, StepInput
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.errors import EngineError
from tandem.models.routing import NO_MIXTURES, Mixtures

RunnerName = Literal["auto", "fused", "module"]


class Runner(Protocol):
    """The protocol of a runner: the forward of one model over a paged KV cache.

    A runner has its own weights, or references to the module's weights. Delete the runner to free them.

    Attributes:
        layers: The shape of the KV-cache entry that each attention layer stores per token.
        dtype: The dtype of the weights and of the KV cache.
        device: The device of the weights and of the KV cache.
        weight_bytes: The bytes of this rank's shard of the weights.
        copies: Whether the weights are the runner's own copies, so that the module's weights can be freed.
        angle_limits: The lengths, in tokens, above which a sequence has other rotary angles. Its keys must
            then be computed again (see `AngleTables`).
        records: The mixtures whose choice of experts each forward records (see `PagedCache.record`); None if
            nothing is recorded.
        record_bytes: The bytes per token of what is recorded; 0 if nothing is.
    """

    layers: tuple[LayerShape, ...]
    dtype: dtype
    device: device
    weight_bytes: int
    copies: bool
    angle_limits: tuple[int, ...]
    records: Mixtures | None
    record_bytes: int

    def renew(self, module: nn.Module) -> bool:
        """Switch to the module's current weights if they belong to the same model.

        Compare the addresses of the tensors in `reads` to find out whether graphs of the forward are still
        valid.

        Returns:
            Whether the runner has switched. If not, a new runner must be created.
        """

    def release_weights(self) -> bool:
        """Free the memory of the runner's copies if it can be allocated again at the same addresses.

        Returns:
            Whether the memory was freed. Then the runner waits for `renew`. If not, the runner must be
            dropped.
        """

    def reads(self) -> Sequence[Tensor]:
        """Return all tensors that a forward reads but does not create, except the KV cache."""

    def copied(self, module: nn.Module) -> Iterator[tuple[str, Tensor]] | None:
        """Yield the runner's copies of the weights, with the names of the module's parameters.

        The result is None if the runner reads the module's weights directly.
        """

    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        """Compute the step's tokens and write their keys and values into the attention's cache.

        Returns:
            (L, V) The logits of the next token after each token of `step.logits_L`.
        """


def make_runner(
    name: RunnerName,
    module: nn.Module,
    max_length: int,
    split: LayerSplit = WHOLE,
    *,
    copies: bool | None = None,
    records: bool = False,
) -> Runner:
    """Create the named runner. "auto" means "fused" if that runner supports the model, else "module".

    Args:
        name: The runner's name.
        module: A transformers causal LM.
        max_length: The maximum number of tokens of a sequence.
        split: This rank's shard of each layer. Only the fused runner supports a split.
        copies: Whether the fused runner has copies of the weights (see `FusedRunner`). None means yes on
            CUDA, no elsewhere.
        records: Whether the runner records the choice of experts.

    Raises:
        ModelError: The choice of experts cannot be recorded.
        EngineError: The fused runner was requested but does not support the model, neither runner supports
            the model, or the runner does not support a split.
        ConfigError: The model cannot be split evenly.
    """
    reason = "runner=module" if name == "module" else why_not_fused(module)
    if reason is None and split.size > 1 and module.config.model_type not in PLAIN_DECODERS:  # type: ignore[union-attr,operator]
        reason = "it cannot split a mixture of experts"
    if records and not getattr(module, "mixtures", NO_MIXTURES).layers:
        reason = reason or "the model has no mixture of experts"
    if reason is None:
        if copies is None:
            copies = next(module.parameters()).is_cuda
        return FusedRunner(module, max_length, split, copies=copies, records=records)
    if split.size > 1:
        raise EngineError(
            f"only the fused runner can split layers over devices, and it is not used: {reason}",
            field="actor_rollout_ref.rollout.tensor_model_parallel_size",
            got=split.size,
            expected="1",
        )
    if name == "fused":
        raise EngineError(
            f"the fused runner cannot run this model: {reason}",
            field="actor_rollout_ref.rollout.runner",
            got="fused",
            remedy="use runner=auto or runner=module",
        )
    return ModuleRunner(module, max_length, records=records)
