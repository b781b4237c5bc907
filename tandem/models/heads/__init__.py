"""Log-probabilities and entropies from hidden states: the protocol, and the choice of an implementation.

None holds the logits of all positions and the whole vocabulary at once, but where they are few (see `tiled`);
else all compute them a second time in the backward pass.
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
    """The head of a policy."""

    def __call__(
        self,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        *,
        temperature: float,
        with_entropy: bool,
        group: TensorGroup | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of each target and, if asked for, the entropy of its distribution, both of
        softmax(hidden weightᵀ / temperature), with gradients to hidden and weight.

        Args:
            hidden_MD: states that predict, M positions of D features; any floating type.
            weight_VD: the output embedding of V vocabulary entries, same type.
            targets_M: int64 token ids.
            temperature: divides the logits; > 0.
            with_entropy: whether entropies are asked for.
            group: the ranks that share the vocabulary, each with some rows of the output embedding
                (Shoeybi et al. 2019, arXiv 1909.08053, section 3). What they exchange are numbers per
                position, and once the gradient of the states. None: this one has all of it.

        Returns:
            (M) log-probabilities and (M) entropies or None, nats; fp32, or fp64 for fp64 input.
        """


def head_name(asked: str, device: torch.device) -> str:
    """The name of the head that is meant for tensors on a device: "auto" is Triton's where it can run, else
    PyTorch's."""
    if asked != "auto":
        return asked
    return "triton" if device.type == "cuda" and find_spec("triton") else "torch"


def make_head(name: str, device: torch.device) -> Head:
    """The head of that name for tensors on a device; see `head_name`.

    Raises:
        ConfigError: a head that cannot run there, or whose package is not installed.
    """
    name = head_name(name, device)
    needed = [*HEADS[name].packages]
    if needed and device.type != "cuda":
        raise ConfigError(
            "these kernels run on CUDA devices alone",
            field=_FIELD,
            got=f"{name} on {device.type}",
            expected="auto or torch",
            remedy=f"set {_FIELD}=auto, which is PyTorch's here",
        )
    if name == "liger" and torch.cuda.get_device_capability(device) == (9, 0):
        needed.append("cutlass")
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        problem = f"not installed: {', '.join(missing)}"
        raise ConfigError(problem, field=_FIELD, got=name, remedy=HEADS[name].install)
    module = "tiled" if name == "torch" else name  # loaded by name: the others are not installed everywhere
    head: Head = import_module(f"{__name__}.{module}").token_log_probs
    return head
