"""A lean decoder over the parameters of a transformers model of the Llama family (Llama, Mistral,
Qwen2, Qwen3): the same arithmetic as the module, without its Python per layer.

Shape suffixes: R rows, B prompts, T prompt columns, E hidden size, H key heads, G query heads per key
head, N all heads (query then key), D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.engines.rollout.native.cache import DecodePlan, KVCache, LayerShape, Prefill
from tandem.models.linear import added_linear, linear

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose angles depend on the position alone
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def why_not_fused(module: nn.Module, max_length: int) -> str | None:
    """Why `FusedRunner` cannot run the model, or None if it can."""
    config: Any = module.config
    if config.model_type not in _MODEL_TYPES:
        return f"model type {config.model_type} is none of {', '.join(_MODEL_TYPES)}"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rope parameters {rope}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    layer_types = getattr(config, "layer_types", None) or ()
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in layer_types or (config.model_type == "mistral" and window is not None)
    if slides and window is not None and window < max_length:
        return f"sliding window of {window} tokens below the {max_length} of a sequence"
    for name, child in module.named_modules():
        if name.endswith((*_PROJECTIONS, *_MLP, "lm_head")) and type(child) is not nn.Linear:
            return f"{name} is a {type(child).__name__}, not a Linear"
    return None


_JOIN_UP_TO_BYTES = 2**31

_Linear = tuple[Tensor, Tensor | None]
"""Weight and bias."""


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm_E: Tensor
    qkv: tuple[_Linear, ...]
    qk_norm_ND: Tensor | None
    output: _Linear
    mlp_norm_E: Tensor
    gate_up: tuple[_Linear, ...]
    down: _Linear


class FusedRunner:
    """See `Runner`. On a CPU, query, key and value weights are joined into one matrix, gate and up into
    another, made anew for each weight version: fewer and larger products. Where these copies, about two
    thirds of the layers' weights, would be large, and on other devices, the module's own are used."""

    def __init__(self, module: nn.Module, max_length: int) -> None:
        config: Any = module.config
        model: Any = module.model
        self.kv_heads = config.num_key_value_heads or config.num_attention_heads
        self.group = config.num_attention_heads // self.kv_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        self.embedding_VE: Tensor = model.embed_tokens.weight.detach()
        self.head: _Linear = _parameters(module.lm_head)
        self.norm_E: Tensor = model.norm.weight.detach()
        self.dtype, self.device = self.embedding_VE.dtype, self.embedding_VE.device
        layers_bytes = sum(p.numel() * p.element_size() for p in model.layers.parameters())
        self._joins = self.device.type == "cpu" and layers_bytes <= _JOIN_UP_TO_BYTES
        self._layers = [self._layer(layer) for layer in model.layers[: config.num_hidden_layers]]
        self.layers = (LayerShape(self.kv_heads, self.head_dim, self.head_dim),) * len(self._layers)
        self._cos_P1D, self._sin_P1D = self._rope_tables(model.rotary_emb, max_length)
        self._scale_N1 = torch.ones(self.kv_heads * (self.group + 1), 1, dtype=self.dtype, device=self.device)
        self._scale_N1[: self.kv_heads * self.group] = self.head_dim**-0.5

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        join = _joined if self._joins else _separate
        qk_norm = None
        if hasattr(attention, "q_norm"):
            query_norm = attention.q_norm.weight.detach().expand(self.kv_heads * self.group, -1)
            qk_norm = torch.cat((query_norm, attention.k_norm.weight.detach().expand(self.kv_heads, -1)))
        return _Layer(
            attention_norm_E=layer.input_layernorm.weight.detach(),
            qkv=join(attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norm_ND=qk_norm,
            output=_parameters(attention.o_proj),
            mlp_norm_E=layer.post_attention_layernorm.weight.detach(),
            gate_up=join(mlp.gate_proj, mlp.up_proj),
            down=_parameters(mlp.down_proj),
        )

    def _rope_tables(self, rotary: nn.Module, max_length: int) -> tuple[Tensor, Tensor]:
        """cos and sin per position from the model's own rotary module. The first half of sin is negated, so
        that a rotation is x * cos + roll(x) * sin."""
        positions = torch.arange(max_length, device=self.device)[None]
        cos_PD, sin_PD = (table[0] for table in rotary(self.embedding_VE[:1, None], positions))
        half = self.head_dim // 2
        return cos_PD[:, None], torch.cat((-sin_PD[:, :half], sin_PD[:, half:]), -1)[:, None]

    def _qkv(self, layer: _Layer, x_RE: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (R, H*G, D) and keys (R, H, D); values (R, H, D). The tables are (R, 1 or N, D)."""
        qkv = _project(self._norm(x_RE, layer.attention_norm_E), layer.qkv).view(len(x_RE), -1, self.head_dim)
        qk_RND, value_RHD = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        if layer.qk_norm_ND is not None:
            qk_RND = self._norm(qk_RND, None) * layer.qk_norm_ND
        rolled_RND = qk_RND.roll(self.head_dim // 2, -1)
        qk_RND = torch.addcmul(qk_RND * cos, rolled_RND, sin)
        return qk_RND[:, : -self.kv_heads], qk_RND[:, -self.kv_heads :], value_RHD

    def _mlp(self, layer: _Layer, x_RE: Tensor) -> Tensor:
        gate_RI, up_RI = _project(self._norm(x_RE, layer.mlp_norm_E), layer.gate_up).chunk(2, -1)
        return added_linear(x_RE, F.silu(gate_RI).mul_(up_RI), *layer.down)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMS norm over the last dimension, rounded where transformers' norms round: they compute in
        float32 whatever the model's type, and multiply by the weight in that type."""
        normed = F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)
        return normed if weight is None else normed * weight

    def _logits(self, x_RE: Tensor) -> Tensor:
        return linear(self._norm(x_RE, self.norm_E), *self.head)

    def decode(self, ids_R: Tensor, plan: DecodePlan, cache: KVCache) -> Tensor:
        x_RE = F.embedding(ids_R, self.embedding_VE)
        # The softmax scale rides on the queries' rotation, once per step instead of once per layer.
        cos_RND = self._cos_P1D[plan.positions_R] * self._scale_N1
        sin_RND = self._sin_P1D[plan.positions_R] * self._scale_N1
        grouped = (-1, self.kv_heads, self.group, self.head_dim)
        for index, layer in enumerate(self._layers):
            query, key, value = self._qkv(layer, x_RE, cos_RND, sin_RND)
            cache.write(index, plan, key, value)
            attended = cache.attend(index, plan, query.reshape(grouped))
            x_RE = self._mlp(layer, added_linear(x_RE, attended.flatten(1), *layer.output))
        return self._logits(x_RE)

    def prefill(self, ids_BT: Tensor, lengths_B: Tensor) -> Prefill:
        prompts, width = ids_BT.shape
        x_RE = F.embedding(ids_BT.flatten(), self.embedding_VE)
        cos_R1D, sin_R1D = (table[:width].repeat(prompts, 1, 1) for table in (self._cos_P1D, self._sin_P1D))
        keys, values = [], []
        for layer in self._layers:
            query, key, value = (
                part.reshape(prompts, width, -1, self.head_dim).transpose(1, 2)
                for part in self._qkv(layer, x_RE, cos_R1D, sin_R1D)
            )
            keys.append(key)
            values.append(value)
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self.group > 1
            )
            rows_RE = attended.transpose(1, 2).reshape(len(x_RE), -1)
            x_RE = self._mlp(layer, added_linear(x_RE, rows_RE, *layer.output))
        last_B = torch.arange(prompts, device=ids_BT.device) * width + lengths_B - 1
        return Prefill(keys, values, self._logits(x_RE[last_B]))


def _parameters(part: Any) -> _Linear:
    return part.weight.detach(), None if part.bias is None else part.bias.detach()


def _separate(*parts: Any) -> tuple[_Linear, ...]:
    return tuple(_parameters(part) for part in parts)


def _joined(*parts: Any) -> tuple[_Linear, ...]:
    """One linear map whose outputs are those of all; they have all a bias or none."""
    weights, biases = zip(*_separate(*parts), strict=True)
    return ((torch.cat(weights), None if biases[0] is None else torch.cat(biases)),)


def _project(x_RE: Tensor, linears: tuple[_Linear, ...]) -> Tensor:
    """The outputs of all linear maps side by side."""
    out = [linear(x_RE, *weights) for weights in linears]
    return out[0] if len(out) == 1 else torch.cat(out, -1)
