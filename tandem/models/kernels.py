"""Choice of the kernels for a model's norms, gated layers and rotary embeddings."""

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
    """The kernels that a model uses; `str` describes them for the user.

    Attributes:
        layers: the result of `choose_kernels`.
        head: the name of a policy's head; None for other models.
    """

    layers: str = "transformers"
    head: str | None = None

    @property
    def fused(self) -> bool:
        """Whether each norm and gated layer is one kernel that keeps only its inputs."""
        return self.layers in ("liger", "triton")

    def __str__(self) -> str:
        layers = LAYERS[self.layers].words
        return layers if self.head is None else f"log-probs by {HEADS[self.head].words}, {layers}"


def choose_kernels(model: PreTrainedModel, asked: bool | None, device: torch.device, fsdp: FSDPConfig) -> str:
    """Choose the kernels of a model and put fused kernels into it, in place.

    Fused kernels need a CUDA device. Call this before anything else changes the model.

    Args:
        model: the transformers model.
        asked: True: use Liger's kernels. False: use no fused kernels. None: use Liger's kernels if Liger is
            installed and knows this kind of model, else the kernels of `fused` if they support a layer of the
            model.
        device: the device on which the model will run.
        fsdp: says whether the layers are compiled by torch.compile, and has the settings that exclude Liger's
            kernels.

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
    """Put Liger's kernels into the model; its head stays as it is.

    Liger's rotary embeddings take effect for every model of this kind in the process.

    Args:
        model: the transformers model; it is changed in place.
        device: the device on which the model will run.

    Raises:
        ConfigError: If the device is not a CUDA device, liger-kernel is not installed, or it does not know
            this kind of model.
    """
    problem, got, remedy = "Liger's kernels run only on CUDA devices", "true", "set use_liger=false"
    if device.type != "cuda":
        raise ConfigError(problem, field=_FIELD, got=f"{got} on {device.type}", remedy=remedy)
    if find_spec("liger_kernel") is None:
        problem = "the package liger-kernel is not installed"
        raise ConfigError(problem, field=_FIELD, got=got, remedy=LAYERS["liger"].install)
    patch(model)


def knows(model: PreTrainedModel) -> bool:
    """Return whether the installed Liger has kernels for this kind of model."""
    liger: Any = import_module("liger_kernel.transformers.monkey_patch")
    return model.config.model_type in liger.MODEL_TYPE_TO_APPLY_LIGER_FN


def patch(model: PreTrainedModel) -> None:
    """Do what `use_liger` does, without its checks of the device and the package."""
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
    definitions.update(classes)  # restore: models loaded later get Liger's layers only if asked
