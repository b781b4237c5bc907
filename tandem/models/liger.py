"""Liger's Triton kernels in place of a model's norms, rotary embeddings and gated layers."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.errors import ConfigError

_FIELD = "model.use_liger"


def use_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Puts Liger's kernels into the model. Rotary embeddings change for every model of its kind in this
    process; the head stays as it is.

    Args:
        device: where the model will run.

    Raises:
        ConfigError: not a CUDA device, no liger-kernel, or a kind of model that it does not know.
    """
    if device.type != "cuda":
        raise ConfigError(
            "Liger's kernels run on CUDA devices alone",
            field=_FIELD,
            got=f"true on {device.type}",
            remedy="set use_liger=false",
        )
    if find_spec("liger_kernel") is None:
        raise ConfigError(
            "the package liger-kernel is not installed",
            field=_FIELD,
            got="true",
            remedy="pip install 'liger-kernel>=0.8.5'",
        )
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
