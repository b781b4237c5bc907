"""Decoder layers and the head's tiles through torch.compile.

Of a layer, what stands before attention and what follows it becomes a few kernels each. Attention itself
runs as it is: its shapes are those of each micro-batch's sequences, and with Ulysses it exchanges tokens.
Elsewhere the number of tokens is the only size that varies, so that one compilation serves every
micro-batch, and every layer of one kind.

A layer that was not called with a packing, as a rollout calls it, runs as it is, and so does one with fewer
tokens than kernels are worth.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.models.attention import no_view
from tandem.models.heads import token_log_probs
from tandem.models.heads.compiled import token_log_probs as compiled_log_probs
from tandem.models.pipeline import own_layers
from tandem.models.policy import PackedModel, PolicyModel

FIELD = "fsdp_config.use_torch_compile"
# Below, products take other kernels, and a size of one would be compiled on its own.
_MIN_TOKENS = 8
# Of one layer's code, over all models of the process: with and without gradient, per precision and shape.
_VARIANTS = 64


def require_compiler(device: torch.device) -> None:
    """
    Raises:
        ConfigError: what torch.compile needs besides PyTorch is not installed.
    """
    names = ["gcc", "clang"] if device.type == "cuda" else ["clang++" if sys.platform == "darwin" else "g++"]
    chosen = os.environ.get("CC" if device.type == "cuda" else "CXX")
    names = [chosen] if chosen else names
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not any(shutil.which(name) for name in names):
        missing = f"no compiler {' or '.join(names)} on the PATH"
    elif not header.is_file():
        missing = f"no {header}"
    else:
        return
    raise ConfigError(
        "torch.compile needs a compiler and Python's headers",
        field=FIELD,
        got=f"true with {missing}",
        remedy="install them (g++ and python3-dev), or set use_torch_compile=false",
    )


def compile_model(model: PackedModel) -> None:
    """Makes the layers run compiled when they are called with a packing, and a policy's head if it is
    PyTorch's. In place; before layers are made to run again in the backward pass, and before they are
    sharded."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    if isinstance(model, PolicyModel) and model.head is token_log_probs:
        model.head = compiled_log_probs
    for layer in own_layers(model):
        changed: Any = layer
        changed.forward = partial(_forward, layer.forward, torch.compile(layer.forward, dynamic=True))


def _forward(plain: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hidden_1ND: Tensor = args[0] if args else kwargs["hidden_states"]
    if kwargs.get("packing") is None or hidden_1ND.shape[1] < _MIN_TOKENS:
        return plain(*args, **kwargs)
    out = compiled(*args, **kwargs)
    # FSDP warns of layers that return views: what is done to one in place would lose its hook.
    return no_view(out) if isinstance(out, Tensor) and out._base is not None else out
