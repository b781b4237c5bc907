"""Causal attention over packed sequences, registered as an attention function of transformers.

Many sequences are packed into one row, and each token attends only to tokens of the same sequence. Models
loaded with `attention=PACKED` call this function in every layer. The layout of the sequences comes with the
layer's mask; see `tandem.models.masks`.

Shapes: N packed tokens; H query heads, K key and value heads, D features of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.errors import ModelError
from tandem.models.attention_kernels import TORCH, Kernel, choose_kernel, make_kernel, torch_varlen
from tandem.models.masks import Mask, mask_of, register_attention
from tandem.models.packing import Packing
from tandem.models.rectangles import Scores, rectangular
from tandem.models.sequence_parallel import SequenceSplit
from tandem.models.tensor_group import local

PACKED = "tandem_packed"

_UNSUPPORTED = ("position_bias",)


def is_packed(mask: Any) -> bool:
    """Return whether an argument of a layer is the mask of packed sequences."""
    return isinstance(mask, Mask) and isinstance(mask.tokens, Packing)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kernel: Kernel | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' attention interface.

    Args:
        module: the attention layer that calls this function.
        query: (1, H, N, D). If ranks share the tokens (sequence parallelism), all inputs contain only this
            rank's tokens.
        key: (1, K, N, D).
        value: (1, K, N, D); the values may have another number of features than the keys.
        attention_mask: the `Mask` of the layer, with the layout of the sequences.
        scaling: the factor of the scores; None: D^-0.5.
        softcap: the soft cap of the scores; None: no cap.
        s_aux: (H), the sinks, one more score per head; None: no sinks.
        kernel: the kernel for half precision on a GPU; None: PyTorch's kernel.
        **options: further options of transformers. A `sliding_window` among them is not used, because the
            mask has the window.

    Returns:
        The output (1, N, H, D of the values), and None instead of attention weights.

    Raises:
        ModelError: If there is no mask of packed sequences, or if the layer adds biases to its scores.
    """
    mask = mask_of(attention_mask, module)
    biased = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if biased or not isinstance(mask.tokens, Packing):
        raise ModelError(
            "this model's attention cannot be computed over packed sequences",
            got=f"{type(module).__name__} with {', '.join(biased) or 'no layout of its sequences'}",
            expected="causal attention without biases, called through PolicyModel or ValueModel",
        )
    packing = mask.tokens.chunked(mask.chunk) if mask.chunk else mask.tokens
    query = by_position(module, query, mask.tokens.position_ids)
    window = mask.window if mask.window < packing.max_length else 0
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks_H = None if s_aux is None else local(s_aux)
    rows = [heads.transpose(1, 2).squeeze(0) for heads in (query, key, value)]
    width = rows[2].shape[-1]
    if packing.split is not None:
        rows, sinks_H = _over_heads(rows, sinks_H, packing.split)
    scores = Scores(scale, window, softcap or 0.0, sinks_H)
    out_NHD = _computed(rows, packing, scores, kernel or torch_varlen)[..., :width]
    if packing.split is not None:
        out_NHD = packing.split.to_tokens(out_NHD)
    return out_NHD.unsqueeze(0), None


def by_position(module: Any, query_1HND: Tensor, positions_N: Tensor) -> Tensor:
    """Correct the scale of Llama 4's queries, which transformers computes from a token's index in the row."""
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query_1HND

    def scale(places_N: Tensor) -> Tensor:
        steps_N = torch.floor((places_N + 1.0) / module.floor_scale)
        scale_N: Tensor = torch.log1p(steps_N) * module.attn_scale + 1.0
        return scale_N

    factor_N = scale(positions_N) / scale(torch.arange(len(positions_N), device=positions_N.device))
    return query_1HND * factor_N.to(query_1HND.dtype).unsqueeze(-1)


def _computed(rows: list[Tensor], packing: Packing, scores: Scores, kernel: Kernel) -> Tensor:
    """Compute attention by a kernel if it can, else over rectangles."""
    half = rows[0].dtype in (torch.bfloat16, torch.float16)
    if not (rows[0].is_cuda and half and kernel.takes(scores)):
        return rectangular(rows, packing, scores)
    return kernel.attend(_same_width(rows), packing, scores)


def _over_heads(
    rows: list[Tensor], sinks_H: Tensor | None, split: SequenceSplit
) -> tuple[list[Tensor], Tensor | None]:
    """Exchange this rank's tokens for this rank's heads, also of the sinks."""
    if sinks_H is not None:
        sinks_H = sinks_H.chunk(split.size)[split.place]
    return split.to_heads(_same_width(rows)), sinks_H


def _same_width(rows: list[Tensor]) -> list[Tensor]:
    """Pad heads with zeros to the widest head. This does not change scores, and adds zeros to the values."""
    widest = max(part.shape[-1] for part in rows)
    return [part if part.shape[-1] == widest else F.pad(part, (0, widest - part.shape[-1])) for part in rows]


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
    register_attention(name, partial(_attention, kernel=make_kernel(chosen)))
    return name


register_attention(PACKED, _attention)
