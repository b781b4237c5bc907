"""Causal attention over packed sequences, registered as an attention function of transformers.

Many sequences are packed into one row, and each token attends only to tokens of the same sequence. Models
loaded with `attention=PACKED` call this function in every layer. The packing plan is passed through the
keyword arguments of the model's forward.

Shapes: N packed tokens; H query heads, K key and value heads, D features of a head; a rectangle (a padded
block of sequences of similar length) has B sequences of width T.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from tandem.errors import ModelError
from tandem.models.attention_kernels import TORCH, Kernel, choose_kernel, make_kernel, torch_varlen
from tandem.models.packing import Packing

PACKED = "tandem_packed"

# The largest width at which attention scores are materialized. In bf16 on a CPU this is 2 to 7 times as fast
# as PyTorch's flash kernel, forward and backward, at equal error. Memory grows with the square of the width.
_DENSE_WIDTH = 512
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    kernel: Kernel | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' attention interface.

    Args:
        module: the attention layer that calls this function.
        query: (1, H, N, D). If ranks share the tokens (sequence parallelism), all inputs contain only this
            rank's tokens.
        key: (1, K, N, D).
        value: (1, K, N, D).
        attention_mask: not used, because `packing` describes the sequences.
        packing: the layout of the sequences.
        scaling: the factor of the scores; None: D^-0.5.
        sliding_window: the window of the layer, in tokens; it must not be shorter than any sequence.
        kernel: the kernel for half precision on a GPU; None: PyTorch's kernel.
        **options: further options of transformers.

    Returns:
        The output (1, N, H, D), and None instead of attention weights.

    Raises:
        ModelError: If `packing` is missing, or if the layer needs more than plain causal attention.
    """
    if packing is None:
        raise ModelError(
            "packed attention was called without a packing plan",
            remedy="call the model through PolicyModel or ValueModel, or set another attention "
            "implementation before you call the model directly",
        )
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if sliding_window is not None and packing.max_length > sliding_window:
        unsupported.append(f"sliding window of {sliding_window}")
    if unsupported:
        raise ModelError(
            "this model's attention is not plain causal attention",
            got=f"{type(module).__name__} with {', '.join(unsupported)}",
            expected="full causal attention, as in Qwen2, Qwen3 and Llama",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [heads.transpose(1, 2).squeeze(0) for heads in (query, key, value)]
    half = query.dtype in (torch.bfloat16, torch.float16)
    attend = (kernel or torch_varlen) if query.is_cuda and half else rectangular
    if packing.split is None:
        return attend(rows, packing, scale).unsqueeze(0), None
    out_NHD = attend(packing.split.to_heads(rows), packing, scale)
    return packing.split.to_tokens(out_NHD).unsqueeze(0), None


def rectangular(rows: list[Tensor], packing: Packing, scale: float) -> Tensor:
    """Compute attention over rectangles, which are padded blocks of sequences of similar length.

    Causal attention needs no mask for padding on the right. The outputs at padding are dropped.
    """
    places = packing.places
    if places is not None:
        rows = [x.new_zeros(packing.padded_tokens, *x.shape[1:]).index_copy(0, places, x) for x in rows]
    sizes = [rows_B * width for rows_B, width in packing.rectangles]
    outputs = []
    pieces = (torch.split(x, sizes) for x in rows)
    for shape, *parts in zip(packing.rectangles, *pieces, strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in parts)
        outputs.append(_causal(q, k, v, scale).transpose(1, 2).flatten(0, 1))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if places is None else out.index_select(0, places)


def _causal(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float) -> Tensor:
    half = q_BHTD.dtype in (torch.bfloat16, torch.float16)
    if q_BHTD.device.type == "cpu" and half and q_BHTD.shape[2] <= _DENSE_WIDTH:
        return _dense(q_BHTD, k_BKTD, v_BKTD, scale)
    grouped = q_BHTD.shape[1] != k_BKTD.shape[1]
    return F.scaled_dot_product_attention(
        q_BHTD, k_BKTD, v_BKTD, is_causal=True, scale=scale, enable_gqa=grouped
    )


def written_scores(packing: Packing, itemsize: int) -> int:
    """Return the number of scores per head that a CPU materializes and keeps for the backward pass.

    Args:
        packing: the layout of the sequences.
        itemsize: bytes per element of the queries.
    """
    if itemsize != torch.bfloat16.itemsize:
        return 0
    return sum(rows * width**2 for rows, width in packing.rectangles if width <= _DENSE_WIDTH)


def _dense(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float) -> Tensor:
    """Return softmax(q kᵀ scale + mask) v, with all scores in memory.

    The query heads that share a key head are the rows of one matrix product.
    """
    B, H, T, D = q_BHTD.shape
    K = k_BKTD.shape[1]
    mask = torch.full((T, T), -math.inf, dtype=q_BHTD.dtype).triu_(1).repeat(H // K, 1)
    q = q_BHTD.reshape(B * K, H // K * T, D)
    scores = torch.baddbmm(mask, q, k_BKTD.reshape(B * K, T, D).transpose(1, 2), alpha=scale)
    out = torch.bmm(torch.softmax(scores, -1), v_BKTD.reshape(B * K, T, D))
    return out.view(B, H, T, D)


def _attend_uncompiled(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Call `packed_attention` between the two compiled parts of a layer.

    The result must not be a view: the base of the view would differ between micro-batches.
    """
    out_1NHD, weights = packed_attention(*args, **kwargs)
    return no_view(out_1NHD), weights


def no_view(tensor: Tensor) -> Tensor:
    """Return an equal tensor that autograd does not treat as a view."""
    out: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return out


_uncompiled: Any = torch.compiler.disable(_attend_uncompiled)  # type: ignore[no-untyped-call]


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    if torch.compiler.is_compiling():
        out_1NHD, weights = _uncompiled(*args, **kwargs)
        return out_1NHD, weights
    return packed_attention(*args, **kwargs)


def attention_name(implementation: str, device: torch.device, head_width: int) -> str:
    """Register `packed_attention` with a kernel, and return its attention name for transformers.

    The name does not contain "flash", because transformers treats such names as its own implementations.

    Args:
        implementation: see `choose_kernel`.
        device: see `choose_kernel`.
        head_width: see `choose_kernel`.

    Raises:
        ConfigError: see `choose_kernel`.
    """
    chosen = choose_kernel(implementation, device, head_width)
    if chosen == TORCH:
        return PACKED
    name = f"{PACKED}_{chosen.removeprefix('flash_attention_')}"
    AttentionInterface.register(name, partial(_attention, kernel=make_kernel(chosen)))
    return name


AttentionInterface.register(PACKED, _attention)
