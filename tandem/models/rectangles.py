"""Causal attention over rectangles, which are padded blocks of packed sequences of similar length.

All operations are PyTorch's, so that they run in every precision and on every device.

Shapes: H query heads, K key and value heads, D features of a head; a rectangle has B sequences of width T; a
block has Q queries and S keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tandem.models.packing import Packing

# The largest width at which attention scores are materialized in half precision. In bf16 on a CPU this is 2
# to 7 times as fast as PyTorch's flash kernel, forward and backward, at equal error. Memory grows with the
# square of the width.
_DENSE_WIDTH = 512
_BLOCK = 256  # queries that are processed together, where each attends to a window or scores are materialized


@dataclass(frozen=True, slots=True)
class Scores:
    """How attention weights follow from queries and keys.

    Attributes:
        scale: the factor of the scores.
        window: the number of last tokens, with the token itself, to which a token attends; 0: all.
        softcap: scores s become softcap · tanh(s / softcap); 0: they stay as they are.
        sinks_H: (H), one more score per head, which takes weight and has no value; None: no such score.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks_H: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether the weights are the softmax of the scaled scores."""
        return not self.softcap and self.sinks_H is None


def rectangular(rows: list[Tensor], packing: Packing, scores: Scores) -> Tensor:
    """Compute attention over rectangles and return the output (N, H, D).

    Causal attention needs no mask for padding on the right. The outputs at padding are dropped.

    Args:
        rows: query (N, H, D), key (N, K, D) and value (N, K, D).
        packing: the layout of the sequences.
        scores: how weights follow from scores.
    """
    places = packing.places
    if places is not None:
        rows = [x.new_zeros(packing.padded_tokens, *x.shape[1:]).index_copy(0, places, x) for x in rows]
    sizes = [rows_B * width for rows_B, width in packing.rectangles]
    outputs = []
    pieces = (torch.split(x, sizes) for x in rows)
    for shape, *parts in zip(packing.rectangles, *pieces, strict=True):
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in parts)
        outputs.append(_causal(q, k, v, scores).transpose(1, 2).flatten(0, 1))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if places is None else out.index_select(0, places)


def _causal(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scores: Scores) -> Tensor:
    T = q_BHTD.shape[2]
    half = q_BHTD.dtype in (torch.bfloat16, torch.float16)
    dense = not scores.plain or (half and q_BHTD.device.type == "cpu")
    if T <= _DENSE_WIDTH and dense:
        return _dense(q_BHTD, k_BKTD, v_BKTD, scores)
    if scores.plain and not 0 < scores.window < T:
        return _product(q_BHTD, k_BKTD, v_BKTD, scores.scale, is_causal=True)
    outputs = []
    for start in range(0, T, _BLOCK):
        stop = min(start + _BLOCK, T)
        first = max(0, start + 1 - scores.window) if scores.window else 0
        block = (q_BHTD[:, :, start:stop], k_BKTD[:, :, first:stop], v_BKTD[:, :, first:stop], scores)
        if not dense:
            seen_QS = _seen(stop - start, stop - first, scores.window, q_BHTD.device)
            outputs.append(_product(*block[:3], scores.scale, attn_mask=seen_QS))
        elif torch.is_grad_enabled():
            outputs.append(checkpoint(_dense, *block, use_reentrant=False))
        else:
            outputs.append(_dense(*block))
    return torch.cat(outputs, 2)


def _product(q_BHQD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float, **mask: Any) -> Tensor:
    grouped = q_BHQD.shape[1] != k_BKSD.shape[1]
    return F.scaled_dot_product_attention(q_BHQD, k_BKSD, v_BKSD, scale=scale, enable_gqa=grouped, **mask)


def _seen(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return (Q, S) bool, the keys that each query attends to. The last query is the last key's token."""
    seen_QS = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen_QS.triu(keys - queries - window + 1) if window else seen_QS


def _dense(q_BHQD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scores: Scores) -> Tensor:
    """Return the attention of a block of queries, with all scores in memory.

    The query heads that share a key head are the rows of one matrix product.
    """
    B, H, Q, D = q_BHQD.shape
    K, S = k_BKSD.shape[1:3]
    seen_QS = _seen(Q, S, scores.window, q_BHQD.device)
    mask_QS = q_BHQD.new_zeros(Q, S).masked_fill_(~seen_QS, -math.inf).repeat(H // K, 1)
    q, k = q_BHQD.reshape(B * K, H // K * Q, D), k_BKSD.reshape(B * K, S, D).transpose(1, 2)
    if scores.softcap:
        found = torch.tanh(torch.bmm(q, k) * (scores.scale / scores.softcap)) * scores.softcap + mask_QS
    else:
        found = torch.baddbmm(mask_QS, q, k, alpha=scores.scale)
    if scores.sinks_H is not None:
        sinks = scores.sinks_H.to(found.dtype).view(K, H // K, 1, 1).expand(B, -1, -1, Q, -1)
        found = torch.cat([found, sinks.reshape(B * K, H // K * Q, 1)], -1)
    weights = torch.softmax(found, -1)[..., :S]
    out = torch.bmm(weights, v_BKSD.reshape(B * K, S, v_BKSD.shape[-1]))
    return out.view(B, H, Q, -1)
