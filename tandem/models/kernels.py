"""Functions that choose the kernels for a model's norms, gated layers and rotary embeddings."""

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
    """The names of the kernels that a model uses. `str` returns a description for the user.

    Attributes:
        layers: the result of `choose_kernels`.
        head: the name of a policy's head; None for other models.
    """

    layers: str = "transformers"
    head: str | None = None

    @property
    def fused(self) -> bool:
        """Whether each norm and gated layer is one kernel that saves only its inputs for backward."""
        return self.layers in ("liger", "triton")

    def __str__(self) -> str:
        layers = LAYERS[self.layers].words
        return layers if self.head is None else f"log-probs by {HEADS[self.head].words}, {layers}"


def choose_kernels(model: PreTrainedModel, asked: bool | None, device: torch.device, fsdp: FSDPConfig) -> str:
    """Choose the kernels of a model, and install fused kernels in the model in place.

    Fused kernels need a CUDA device. Call this before anything else changes the model.

    Args:
        model: the transformers model.
        asked: True: use Liger's kernels. False: use no fused kernels. None: use Liger's kernels if Liger is
            installed and supports this model type, else the kernels of `fused` if they support at least one
            layer of the model.
        device: the device on which the model will run.
        fsdp: the config section that sets torch.compile and the options that exclude Liger's kernels.

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
    """Install Liger's kernels in the model, in place. The head does not change.

    Liger's rotary embeddings are then used by every model of this type in the process.

    Args:
        model: the transformers model; it is changed in place.
        device: the device on which the model will run.

    Raises:
        ConfigError: If the device is not a CUDA device, liger-kernel is not installed, or Liger does not
            support this model type.
    """
    problem, got, remedy = "Liger's kernels run only on CUDA devices", "true", "set use_liger=false"
    if device.type != "cuda":
        raise ConfigError(problem, field=_FIELD, got=f"{got} on {device.type}", remedy=remedy)
    if find_spec("liger_kernel") is None:
        problem = "the package liger-kernel is not installed"
        raise ConfigError(problem, field=_FIELD, got=got, remedy=LAYERS["liger"].install)
    patch(model)


def knows(model: PreTrainedModel) -> bool:
    """Return whether the installed Liger has kernels for this model type."""
    liger: Any = import_module("liger_kernel.transformers.monkey_patch")
    return model.config.model_type in liger.MODEL_TYPE_TO_APPLY_LIGER_FN


def patch(model: PreTrainedModel) -> None:
    """Install Liger's kernels in the model without the checks of `use_liger`."""
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
    definitions.update(classes)  # restores transformers' layers for models loaded later
