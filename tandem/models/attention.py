"""Causal attention within each of many sequences packed into one row, as an attention function
of transformers. Models loaded with `attention=PACKED` call it in every layer; the plan reaches it
through the keyword arguments of the model's forward.

Shapes: N packed tokens; H query heads, K key and value heads, D features of a head; a rectangle
holds B sequences of width T.
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

# Widest rectangle whose scores are written out. In bf16 on a CPU that is 2 to 7 times as fast as
# PyTorch's flash kernel, forward and backward, at equal error; its memory grows with the square.
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
    """Attention in transformers' calling convention.

    Args:
        query: (1, H, N, D); key, value: (1, K, N, D); where ranks share the tokens, of this rank's.
        packing: where the sequences lie.
        scaling: factor of the scores, D^-0.5 if None.
        kernel: for half precision on a GPU; None: PyTorch's.

    Returns:
        (1, N, H, D), and None for the weights that nobody asks for.

    Raises:
        ModelError: no plan, or a kind of attention that is not plain causal.
    """
    if packing is None:
        raise ModelError(
            "packed attention was called without its plan",
            remedy="call the model through PolicyModel or ValueModel, or set another attention "
            "implementation before calling it directly",
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
    """Sequences of about one length side by side; causal attention needs no mask over padding on the
    right, and what padding computes is dropped."""
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
    """How many scores of one head are written out on a CPU, and kept for the backward pass.

    Args:
        itemsize: bytes of a number of the queries.
    """
    if itemsize != torch.bfloat16.itemsize:
        return 0
    return sum(rows * width**2 for rows, width in packing.rectangles if width <= _DENSE_WIDTH)


def _dense(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float) -> Tensor:
    """softmax(q kᵀ scale + mask) v with the query heads of one key head as rows of one matrix."""
    B, H, T, D = q_BHTD.shape
    K = k_BKTD.shape[1]
    mask = torch.full((T, T), -math.inf, dtype=q_BHTD.dtype).triu_(1).repeat(H // K, 1)
    q = q_BHTD.reshape(B * K, H // K * T, D)
    scores = torch.baddbmm(mask, q, k_BKTD.reshape(B * K, T, D).transpose(1, 2), alpha=scale)
    out = torch.bmm(torch.softmax(scores, -1), v_BKTD.reshape(B * K, T, D))
    return out.view(B, H, T, D)


def _between(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """`packed_attention` between the parts of a compiled layer. What it returns is no view: of what it would
    be one differs from micro-batch to micro-batch."""
    out_1NHD, weights = packed_attention(*args, **kwargs)
    return no_view(out_1NHD), weights


def no_view(tensor: Tensor) -> Tensor:
    """The tensor itself, but that autograd does not know of what it is a view."""
    out: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return out


_uncompiled: Any = torch.compiler.disable(_between)  # type: ignore[no-untyped-call]


def _attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    if torch.compiler.is_compiling():
        out_1NHD, weights = _uncompiled(*args, **kwargs)
        return out_1NHD, weights
    return packed_attention(*args, **kwargs)


def attention_name(implementation: str, device: torch.device, head_width: int) -> str:
    """The name by which to load a model whose attention is `packed_attention` with the kernel that is asked
    for. It does not say "flash", by which transformers knows its own.

    Args:
        implementation, device, head_width: see `choose_kernel`.

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
