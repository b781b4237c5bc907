"""Log-probabilities and entropies from hidden states: the protocol, and the choice of an implementation.

None holds the logits of all positions and the whole vocabulary at once, but where they are few (see `tiled`);
else all compute them a second time in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from tandem.errors import ConfigError
from tandem.models.heads.tiled import Tiles, tiles_for, token_log_probs

__all__ = ["HEADS", "Head", "head_name", "make_head", "make_tiles", "token_log_probs"]

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
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability of each target and, if asked for, the entropy of its distribution, both of
        softmax(hidden weightᵀ / temperature), with gradients to hidden and weight.

        Args:
            hidden_MD: states that predict, M positions of D features; any floating type.
            weight_VD: the output embedding of V vocabulary entries, same type.
            targets_M: int64 token ids.
            temperature: divides the logits; > 0.
            with_entropy: whether entropies are asked for.

        Returns:
            (M) log-probabilities and (M) entropies or None, nats; fp32, or fp64 for fp64 input.
        """


HEADS = {  # loaded by name: Triton and Liger are not installed everywhere
    "torch": "tiled:token_log_probs",
    "triton": "triton:token_log_probs",
    "liger": "liger:token_log_probs",
}
_INSTALL = {
    "triton": "install PyTorch's CUDA build, which brings Triton",
    "liger": "pip install 'liger-kernel[cutedsl]>=0.8.5'",
}


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
    if name in _INSTALL:
        _check(name, device)
    module, attribute = HEADS[name].split(":")
    head: Head = getattr(import_module(f"{__name__}.{module}"), attribute)
    return head


def make_tiles(name: str, device: torch.device) -> Callable[[torch.dtype], Tiles]:
    """What gives the tiles, for states of a type, of the head of that name; PyTorch's for one without.
    Ranks that share out the vocabulary evaluate their parts with them. See `make_head`."""
    if head_name(name, device) != "triton":
        return tiles_for
    _check("triton", device)
    made: Callable[[torch.dtype], Tiles] = import_module(f"{__name__}.triton").tiles_for
    return made


def _check(name: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(
            "these kernels run on CUDA devices alone",
            field=_FIELD,
            got=f"{name} on {device.type}",
            expected="auto or torch",
            remedy=f"set {_FIELD}=auto, which is PyTorch's here",
        )
    missing = [package for package in _packages(name, device) if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"not installed: {', '.join(missing)}", field=_FIELD, got=name, remedy=_INSTALL[name]
        )


def _packages(name: str, device: torch.device) -> list[str]:
    if name == "triton":
        return ["triton"]
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return ["liger_kernel", "cutlass"] if hopper else ["liger_kernel"]
