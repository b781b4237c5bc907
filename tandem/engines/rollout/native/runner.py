"""What computes logits: the protocol of runners, and the choice between the two."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor, device, dtype, nn

from tandem.engines.rollout.native.cache import DecodePlan, KVCache, LayerShape, Prefill
from tandem.engines.rollout.native.fused import FusedRunner, why_not_fused
from tandem.engines.rollout.native.module import ModuleRunner
from tandem.errors import EngineError

RunnerName = Literal["auto", "fused", "module"]


class Runner(Protocol):
    """The forward of one model over a cache. Holds references to its weights; drop it to free them."""

    layers: tuple[LayerShape, ...]
    dtype: dtype
    device: device

    def prefill(self, ids_BT: Tensor, lengths_B: Tensor) -> Prefill:
        """Whole prompts, padded at the right."""
        ...

    def decode(self, ids_R: Tensor, plan: DecodePlan, cache: KVCache) -> Tensor:
        """One token per row: writes its keys and values, returns the next token's logits (R, V)."""
        ...


def make_runner(name: RunnerName, module: nn.Module, max_length: int) -> Runner:
    """The runner of that name; "auto" is fused where the model allows it.

    Args:
        module: a transformers causal LM.
        max_length: tokens a sequence can grow to.

    Raises:
        EngineError: "fused" for a model it does not know; a model neither can run.
    """
    if name == "module":
        return ModuleRunner(module)
    reason = why_not_fused(module, max_length)
    if reason is None:
        return FusedRunner(module, max_length)
    if name == "fused":
        raise EngineError(
            f"the fused runner cannot run this model: {reason}",
            field="actor_rollout_ref.rollout.runner",
            got="fused",
            remedy="use runner=auto or runner=module",
        )
    return ModuleRunner(module)
