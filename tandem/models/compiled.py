"""Compilation of decoder layers and of the head's tiles with torch.compile.

In a layer, the operations before attention are compiled to a few kernels, and so are the operations after
attention. Attention itself is not compiled. Its shapes depend on the sequences of each micro-batch, and with
Ulysses it exchanges tokens between ranks. In the compiled operations only the number of tokens varies. So one
compilation is used for every micro-batch and for every layer of the same structure.

A layer runs uncompiled if it is called without packed sequences, as in a rollout, or with so few tokens that
compiled kernels are not faster.
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
from tandem.models.attention import is_packed, no_view
from tandem.models.heads import token_log_probs
from tandem.models.heads.compiled import token_log_probs as compiled_log_probs
from tandem.models.pipeline import own_layers
from tandem.models.policy import PackedModel, PolicyModel

FIELD = "fsdp_config.use_torch_compile"
# With fewer tokens, matrix products use other kernels, and a size of one would need a separate compilation.
_MIN_TOKENS = 8
# Maximum compilations of a layer's code per process: with and without gradient, per precision and shape.
_VARIANTS = 64


def require_compiler(device: torch.device) -> None:
    """Check that the compiler and the headers that torch.compile needs are installed.

    Raises:
        ConfigError: If the compiler or a header is missing.
    """
    names = ["gcc", "clang"] if device.type == "cuda" else ["clang++" if sys.platform == "darwin" else "g++"]
    chosen = os.environ.get("CC" if device.type == "cuda" else "CXX")
    names = [chosen] if chosen else names
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not any(shutil.which(name) for name in names):
        missing = f"no compiler {' or '.join(names)} on the PATH"
    elif not header.is_file():
        missing = f"no file {header}"
    else:
        return
    raise ConfigError(
        "torch.compile needs a compiler and Python's headers",
        field=FIELD,
        got=f"true, with {missing}",
        remedy="install them (g++ and python3-dev), or set use_torch_compile=false",
    )


def compile_model(model: PackedModel) -> None:
    """Compile the layers of a model in place. For a policy, also compile the tiled PyTorch head.

    A layer runs compiled only if it is called with packed sequences. Call this before gradient checkpointing
    is set up and before the layers are sharded.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    if isinstance(model, PolicyModel) and model.head is token_log_probs:
        model.head = compiled_log_probs
    for layer in own_layers(model):
        changed: Any = layer
        changed.forward = partial(_forward, layer.forward, torch.compile(layer.forward, dynamic=True))


def _forward(plain: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hidden_1ND: Tensor = args[0] if args else kwargs["hidden_states"]
    if not any(map(is_packed, (*args, *kwargs.values()))) or hidden_1ND.shape[1] < _MIN_TOKENS:
        return plain(*args, **kwargs)
    out = compiled(*args, **kwargs)
    # FSDP warns about layers that return views, because an in-place change of a view would lose FSDP's hook.
    return no_view(out) if isinstance(out, Tensor) and out._base is not None else out
