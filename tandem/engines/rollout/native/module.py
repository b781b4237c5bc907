"""The runner for any causal LM whose attention goes through transformers' attention interface: the
model's own forward, with an attention function that reads and writes the engine's cache.

Shape suffixes: B prompts, T prompt columns, R rows, N query heads, H key heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from tandem.engines.rollout.borrowed import borrowed
from tandem.engines.rollout.native.cache import DecodePlan, KVCache, LayerShape, Prefill
from tandem.errors import EngineError

_ATTENTION = "tandem_rollout"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(slots=True)
class _Call:
    """What one forward hands to its attention layers: a cache to decode over, or none for a prefill,
    which leaves its keys and values here by layer."""

    plan: DecodePlan | None = None
    cache: KVCache | None = None
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


class ModuleRunner:
    """See `Runner`.

    Raises:
        EngineError: attention that does not pass through the interface in every layer, or of a kind
            that plain keys and values cannot express.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        embedding = module.get_input_embeddings().weight  # type: ignore[operator]
        self.dtype, self.device = embedding.dtype, embedding.device
        with torch.no_grad():
            one_token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            probe = self.prefill(one_token, torch.ones(1, dtype=torch.int64, device=self.device))
        self.layers = tuple(
            LayerShape(k.shape[1], k.shape[3], v.shape[3])
            for k, v in zip(probe.keys, probe.values, strict=True)
        )

    def prefill(self, ids_BT: Tensor, lengths_B: Tensor) -> Prefill:
        call = _Call()
        positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        keep, place_B = torch.unique(lengths_B - 1, return_inverse=True)
        logits_BUV = self._forward(ids_BT, positions_BT, call, keep)
        layers = range(self._module.config.get_text_config().num_hidden_layers)  # type: ignore[union-attr, operator]
        if set(call.keys) != set(layers):
            raise EngineError(
                "not every layer's attention goes through transformers' attention interface",
                field="actor_rollout_ref.rollout.name",
                got=f"{type(self._module).__name__}: {len(call.keys)} of {len(layers)} layers",
                remedy="use rollout.name=hf for this model",
            )
        rows_B = torch.arange(len(ids_BT), device=ids_BT.device)
        return Prefill(
            [call.keys[i] for i in layers], [call.values[i] for i in layers], logits_BUV[rows_B, place_B]
        )

    def decode(self, ids_R: Tensor, plan: DecodePlan, cache: KVCache) -> Tensor:
        call = _Call(plan, cache)
        return self._forward(ids_R[:, None], plan.positions_R[:, None], call, 1)[:, 0]

    def _forward(self, ids: Tensor, positions: Tensor, call: _Call, keep: Tensor | int) -> Tensor:
        with borrowed(self._module, _ATTENTION):
            out = self._module(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, rollout_call=call
            )
        logits: Tensor = out.logits
        return logits


def _attention(
    layer: Any,
    query_BNTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    rollout_call: _Call,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention; (B, T, N, value_dim) and no weights."""
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if unsupported:
        raise EngineError(
            f"this model's attention uses {', '.join(unsupported)}",
            field="actor_rollout_ref.rollout.name",
            got=type(layer).__name__,
            remedy="use rollout.name=hf for this model",
        )
    index = layer.layer_idx
    scale = query_BNTD.shape[-1] ** -0.5 if scaling is None else scaling
    plan, cache = rollout_call.plan, rollout_call.cache
    if plan is None or cache is None:
        rollout_call.keys[index], rollout_call.values[index] = key_BHTD, value_BHTD
        return _causal(query_BNTD, key_BHTD, value_BHTD, scale, sliding_window).transpose(1, 2), None
    cache.write(index, plan, key_BHTD[:, :, 0], value_BHTD[:, :, 0])
    query_RHGD = (query_BNTD[:, :, 0] * scale).reshape(
        len(query_BNTD), key_BHTD.shape[1], -1, query_BNTD.shape[-1]
    )
    return cache.attend(index, plan, query_RHGD, sliding_window).flatten(1, 2).unsqueeze(1), None


def _causal(
    query_BNTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, scale: float, window: int | None
) -> Tensor:
    grouped = query_BNTD.shape[1] != key_BHTD.shape[1]
    width = query_BNTD.shape[2]
    mask = None
    if window is not None and window < width:
        mask = torch.ones(width, width, dtype=torch.bool, device=query_BNTD.device).tril_().triu_(1 - window)
    return F.scaled_dot_product_attention(
        query_BNTD,
        key_BHTD,
        value_BHTD,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=grouped,
    )


AttentionInterface.register(_ATTENTION, _attention)
