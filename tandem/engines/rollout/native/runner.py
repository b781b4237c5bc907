"""Runners, which compute logits: their protocol, and the choice between the two."""

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
    """The forward of one model over a paged cache. Holds its weights, or references to them; drop it to free
    them.

    Attributes:
        layers: what each attention layer keeps per token.
        dtype, device: of the weights, and of the cache it can run over.
        weight_bytes: of this rank's share of them.
        copies: whether the weights are copies of its own, so that the module's can go.
    """

    layers: tuple[LayerShape, ...]
    dtype: dtype
    device: device
    weight_bytes: int
    copies: bool

    def renew(self, module: nn.Module) -> bool:
        """Go over to the module's weights as they are now, if they are of the same model. Whether graphs of
        its forward stay good then is for `reads` to say.

        Returns:
            Whether it has; else another runner must be made.
        """

    def rest(self) -> bool:
        """Give the memory of its own copies back, if it can take it again in the same place.

        Returns:
            Whether it has, and waits for `renew`; else it must be dropped.
        """

    def reads(self) -> Sequence[Tensor]:
        """What a forward reads and does not itself make, the cache apart."""

    def copied(self, module: nn.Module) -> Iterator[tuple[str, Tensor]] | None:
        """Its own copies by the names of the module's parameters; None where it reads the module's own."""

    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        """Run the step's tokens, leaving their keys and values in the attention's cache.

        Returns:
            The next token's logits after each of `step.logits_L`, (L, V).
        """


def make_runner(
    name: RunnerName,
    module: nn.Module,
    max_length: int,
    split: LayerSplit = WHOLE,
    *,
    copies: bool | None = None,
) -> Runner:
    """The runner of that name; "auto" is fused where the model allows it.

    Args:
        module: a transformers causal LM.
        max_length: tokens a sequence can grow to.
        split: this rank's share of each layer; only the fused runner can be split.
        copies: whether the fused runner has copies of the weights, see there; None: on CUDA.

    Raises:
        EngineError: "fused" for a model it does not know; a model neither can run; a split of another runner.
        ConfigError: a model that cannot be split evenly.
    """
    reason = "runner=module" if name == "module" else why_not_fused(module)
    if reason is None:
        if copies is None:
            copies = next(module.parameters()).is_cuda
        return FusedRunner(module, max_length, split, copies=copies)
    if split.size > 1:
        raise EngineError(
            f"only the fused runner can split layers over devices, and it is not in use: {reason}",
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
