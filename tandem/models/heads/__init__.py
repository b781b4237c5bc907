"""The protocol of heads, which compute log-probs and entropies, and functions that choose a head.

No head keeps the logits of all positions and the whole vocabulary in memory, unless their size is small (see
`tiled`). Instead, every head computes the logits a second time in the backward pass.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from tandem.config.fusers import HEADS
from tandem.errors import ConfigError
from tandem.models.heads.tiled import token_log_probs
from tandem.models.tensor_group import TensorGroup

__all__ = ["Head", "head_name", "make_head", "token_log_probs"]

_FIELD = "model.fused_kernel_options.impl_backend"


class Head(Protocol):
    """The protocol of a policy's head: a function from hidden states to log-probs and entropies."""

    def __call__(
        self,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        *,
        temperature: float,
        with_entropy: bool,
        group: TensorGroup | None = None,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-prob of each target and, if `with_entropy`, the entropy at each position.

        Both belong to the distribution softmax(z) of the logits z = hidden weightᵀ / temperature or, with a
        softcap, z = softcap tanh(hidden weightᵀ / (temperature softcap)). Both have gradients to hidden and
        weight.

        Args:
            hidden_MD: hidden states that predict the targets, M positions of D features; any floating type.
            weight_VD: the output embedding of V vocabulary entries, same type.
            targets_M: int64 token ids.
            temperature: divides the logits; > 0.
            with_entropy: whether to return entropies.
            group: the ranks that share the vocabulary, each with some rows of the output embedding (Shoeybi
                et al. 2019, arXiv 1909.08053, section 3). The ranks exchange a few numbers per position and,
                in the backward pass, the gradient of the hidden states. None: this rank has the whole
                vocabulary.
            softcap: the largest absolute value of a logit; 0: there is no limit.

        Returns:
            (M) log-probs and (M) entropies or None, in nats; fp32, or fp64 for fp64 input.
        """


def head_name(asked: str, device: torch.device) -> str:
    """Return the name of the head for tensors on a device.

    "auto" means "triton" if Triton can run on the device, else "torch".
    """
    if asked != "auto":
        return asked
    return "triton" if device.type == "cuda" and find_spec("triton") else "torch"


def make_head(name: str, device: torch.device, *, softcap: float = 0.0) -> Head:
    """Return the named head for tensors on a device; see `head_name`.

    Args:
        name: the name of the head.
        device: the device of the tensors.
        softcap: the softcap of the model's logits; 0: there is none.

    Raises:
        ConfigError: If the head cannot run on the device, its package is not installed, or it does not
            support the softcap.
    """
    name = head_name(name, device)
    if name == "liger" and softcap:
        raise ConfigError(
            "Liger's head does not support the softcap of this model's logits",
            field=_FIELD,
            got=f"{name}, softcap {softcap}",
            expected="auto, torch or triton",
            remedy=f"set {_FIELD}=auto",
        )
    needed = [*HEADS[name].packages]
    if needed and device.type != "cuda":
        raise ConfigError(
            "these kernels run only on CUDA devices",
            field=_FIELD,
            got=f"{name} on {device.type}",
            expected="auto or torch",
            remedy=f"set {_FIELD}=auto, which selects PyTorch's head here",
        )
    if name == "liger" and torch.cuda.get_device_capability(device) == (9, 0):
        needed.append("cutlass")
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        problem = f"not installed: {', '.join(missing)}"
        raise ConfigError(problem, field=_FIELD, got=name, remedy=HEADS[name].install)
    module = "tiled" if name == "torch" else name  # other heads need optional packages
    head: Head = import_module(f"{__name__}.{module}").token_log_probs
    return head
