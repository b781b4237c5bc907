"""The choice of kernels for a model's norms, gated layers and rotary embeddings, and how the user is told."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.config.fsdp import FSDPConfig
from tandem.config.fusers import HEADS, LAYERS
from tandem.errors import ConfigError

_FIELD = "model.use_liger"


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
        layers = LAYERS[self.layers].words
        return layers if self.head is None else f"log-probs by {HEADS[self.head].words}, {layers}"


def choose_kernels(model: PreTrainedModel, asked: bool | None, device: torch.device, fsdp: FSDPConfig) -> str:
    """Puts fused kernels into a model that runs on a CUDA device. In place, before anything else changes it.

    Args:
        asked: True: Liger's; False: none; None: Liger's where it is installed and knows this kind of model,
            else those of `fused` where they know a layer.
        device: where the model will run.
        fsdp: says whether the layers go through torch.compile, and what excludes Liger's kernels.

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
    if find_spec("liger_kernel") and knows(model) and not LAYERS["liger"].excluded(fsdp):
        patch(model)
        return "liger"
    if find_spec("triton"):
        fused: Any = import_module("tandem.models.fused")
        return "triton" if fused.fuse(model) else "transformers"
    return "transformers"


def use_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Puts Liger's kernels into the model. Rotary embeddings change for every model of its kind in this
    process; the head stays as it is.

    Args:
        device: where the model will run.

    Raises:
        ConfigError: not a CUDA device, no liger-kernel, or a kind of model that it does not know.
    """
    problem, got, remedy = "Liger's kernels run on CUDA devices alone", "true", "set use_liger=false"
    if device.type != "cuda":
        raise ConfigError(problem, field=_FIELD, got=f"{got} on {device.type}", remedy=remedy)
    if find_spec("liger_kernel") is None:
        problem = "the package liger-kernel is not installed"
        raise ConfigError(problem, field=_FIELD, got=got, remedy=LAYERS["liger"].install)
    patch(model)


def knows(model: PreTrainedModel) -> bool:
    """Whether Liger, which is installed, has kernels for this kind of model."""
    liger: Any = import_module("liger_kernel.transformers.monkey_patch")
    return model.config.model_type in liger.MODEL_TYPE_TO_APPLY_LIGER_FN


def patch(model: PreTrainedModel) -> None:
    """`use_liger` without its checks of the device and the package."""
    liger: Any = import_module("liger_kernel.transformers.monkey_patch")
    kind = model.config.model_type
    if kind not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            "Liger has no kernels for this kind of model",
            field=_FIELD,
            got=kind,
            expected=", ".join(liger.MODEL_TYPE_TO_APPLY_LIGER_FN),
            remedy="set use_liger=false",
        )
    definitions = vars(import_module(type(model).__module__))
    classes = {name: value for name, value in definitions.items() if isinstance(value, type)}
    liger._apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    definitions.update(classes)  # a model loaded later gets Liger's layers only if it asks for them
