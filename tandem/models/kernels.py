"""The choice of kernels for a model's norms, gated layers and rotary embeddings, and how the user is told."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.config.fsdp import FSDPConfig
from tandem.models.liger import knows, patch, use_liger

_WORDS = {
    "liger": "norms, gates and rotary embeddings by Liger's kernels",
    "triton": "norms and gates by fused Triton kernels",
    "transformers": "layers by transformers",
    "compiled": "layers by torch.compile",
}
_HEADS = {"torch": "PyTorch's operators", "triton": "Triton's kernels", "liger": "Liger's kernels"}


@dataclass(frozen=True)
class Kernels:
    """The kernels of a model.

    Attributes:
        layers: what `choose_kernels` gave.
        head: the name of the head, of a policy.
    """

    layers: str = "transformers"
    head: str | None = None

    @property
    def fused(self) -> bool:
        """Whether norms and gated layers are one kernel each, and keep no more than its inputs."""
        return self.layers in ("liger", "triton")

    def __str__(self) -> str:
        layers = _WORDS[self.layers]
        return layers if self.head is None else f"log-probs by {_HEADS[self.head]}, {layers}"


def choose_kernels(model: PreTrainedModel, asked: bool | None, device: torch.device, fsdp: FSDPConfig) -> str:
    """Puts fused kernels into a model that runs on a CUDA device. In place, before anything else changes it.

    Args:
        asked: True: Liger's; False: none; None: Liger's where it is installed and knows this kind of model,
            else those of `fused` where they know a layer.
        device: where the model will run.
        fsdp: says whether the layers go through torch.compile, which fuses the same operations, and whether
            every run gives the same bits, which Liger's kernels do not promise.

    Returns:
        "liger", "triton", "compiled" or "transformers".

    Raises:
        ConfigError: see `use_liger`.
    """
    if asked:
        use_liger(model, device)
        return "liger"
    if fsdp.use_torch_compile:
        return "compiled"
    if asked is False or device.type != "cuda":
        return "transformers"
    single = fsdp.dtype != "fp64"  # Liger's backward pass knows no double precision
    if find_spec("liger_kernel") and knows(model) and single and not fsdp.full_determinism:
        patch(model)
        return "liger"
    if find_spec("triton"):
        fused: Any = import_module("tandem.models.fused")
        return "triton" if fused.fuse(model) else "transformers"
    return "transformers"
