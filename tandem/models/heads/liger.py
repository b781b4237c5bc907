"""The head in Liger's fused linear cross entropy, which gives each position's loss and entropy.

Of Liger's losses this one alone takes a gradient per position (liger-kernel 0.8.5). On Hopper GPUs it runs
kernels of its own, for bfloat16, which need the package's extra `cutedsl`; on others it goes through chunks
of 512 positions in PyTorch, where the entropy has the states' precision, and the weight's gradient is summed
in its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tandem.models.heads import tiled
from tandem.models.tensor_group import TensorGroup

_NO_TARGET = -100  # the id for which Liger computes nothing; no token has it


def token_log_probs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    group: TensorGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See `Head`. Types other than bfloat16, no positions, which Liger refuses, and a vocabulary that ranks
    share out take PyTorch's way."""
    if len(hidden_MD) == 0 or hidden_MD.dtype != torch.bfloat16 or group is not None:
        return tiled.token_log_probs(hidden_MD, weight_VD, targets_M, temperature, with_entropy, group)
    function: Any = import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    found = function.apply(
        hidden_MD.contiguous(), weight_VD, targets_M, float(temperature), _NO_TARGET, 1, with_entropy
    )
    if with_entropy:
        return -found[0], found[1].float()
    return -found, None
