"""A head that uses Liger's fused linear cross entropy, which returns loss and entropy per position.

This is the only loss of Liger that supports a separate gradient for each position (liger-kernel 0.8.5). On
Hopper GPUs it runs special kernels for bfloat16, which need the package's extra `cutedsl`. On other GPUs it
processes chunks of 512 positions in PyTorch. There, the entropy has the precision of the hidden states, and
the weight's gradient is summed in the precision of the weight.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tandem.models.heads import tiled
from tandem.models.tensor_group import TensorGroup

_NO_TARGET = -100  # Liger ignores positions with this target id; no token has this id


def token_log_probs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    group: TensorGroup | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies; see `Head`.

    In three cases PyTorch's head is used instead: for types other than bfloat16, for zero positions (which
    Liger refuses), and if ranks share the vocabulary.
    """
    assert softcap == 0  # `make_head` refuses a softcap
    if len(hidden_MD) == 0 or hidden_MD.dtype != torch.bfloat16 or group is not None:
        return tiled.token_log_probs(hidden_MD, weight_VD, targets_M, temperature, with_entropy, group)
    function: Any = import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    found = function.apply(
        hidden_MD.contiguous(), weight_VD, targets_M, float(temperature), _NO_TARGET, 1, with_entropy
    )
    if with_entropy:
        return -found[0], found[1].float()
    return -found, None
