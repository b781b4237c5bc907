"""Runners, which compute logits: the protocol, and the choice between the two runners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from torch import Tensor, device, dtype, nn

from tandem.engines.rollout.native.attention import Attention
from tandem.engines.rollout.native.fused import FusedRunner, why_not_fused
from tandem.engines.rollout.native.module import ModuleRunner
from tandem.engines.rollout.native.paged import LayerShape, StepInput
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.errors import EngineError

RunnerName = Literal["auto", "fused", "module"]


class Runner(Protocol):
    """The forward of one model over a paged cache.

    A runner holds its weights, or references to them. Drop it to free them.

    Attributes:
        layers: The shape of what each attention layer stores per token.
        dtype, device: Those of the weights, and of the cache it can run over.
        weight_bytes: The bytes of this rank's share of the weights.
        copies: Whether the weights are the runner's own copies, so that the module's weights can be freed.
    """

    layers: tuple[LayerShape, ...]
    dtype: dtype
    device: device
    weight_bytes: int
    copies: bool

    def renew(self, module: nn.Module) -> bool:
        """Switch to the module's current weights if they belong to the same model.

        Whether graphs of the forward stay valid can be seen from `reads`.

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
        """Return the tensors that a forward reads and does not create itself, without the cache."""

    def copied(self, module: nn.Module) -> Iterator[tuple[str, Tensor]] | None:
        """Yield the runner's copies by the names of the module's parameters.

        The result is None if the runner reads the module's own weights.
        """

    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        """Compute the step's tokens and write their keys and values into the attention's cache.

        Returns:
            The logits of the next token after each of `step.logits_L`, (L, V).
        """


def make_runner(
    name: RunnerName,
    module: nn.Module,
    max_length: int,
    split: LayerSplit = WHOLE,
    *,
    copies: bool | None = None,
) -> Runner:
    """Return the runner of this name. "auto" means fused if the model allows it.

    Args:
        name: The runner's name.
        module: A transformers causal LM.
        max_length: The most tokens of a sequence.
        split: This rank's share of each layer. Only the fused runner can be split.
        copies: Whether the fused runner has copies of the weights (see there). None: on CUDA.

    Raises:
        EngineError: "fused" for a model that it does not support, a model that neither runner can run, or a
            split with a runner that cannot be split.
        ConfigError: The model cannot be split evenly.
    """
    reason = "runner=module" if name == "module" else why_not_fused(module)
    if reason is None:
        if copies is None:
            copies = next(module.parameters()).is_cuda
        return FusedRunner(module, max_length, split, copies=copies)
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
    return ModuleRunner(module, max_length)
