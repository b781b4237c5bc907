"""A lean decoder over the parameters of a transformers model of the Llama family (Llama, Mistral,
Qwen2, Qwen3): the same arithmetic as the module, without its Python per layer.

Shape suffixes as in `paged` and `ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tandem.config.model import PLAIN_DECODERS
from tandem.engines.rollout.native.attention import Attention
from tandem.engines.rollout.native.ops import make_ops
from tandem.engines.rollout.native.ops.base import Heads
from tandem.engines.rollout.native.paged import LayerShape, StepInput
from tandem.engines.rollout.native.split import WHOLE, LayerSplit, Weights
from tandem.models.linear import can_pack, linear, pack, packed_linear

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those whose angles depend on the position alone
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def why_not_fused(module: nn.Module) -> str | None:
    """Why `FusedRunner` cannot run the model, or None if it can."""
    config: Any = module.config
    if config.model_type not in PLAIN_DECODERS:
        return f"model type {config.model_type} is none of {', '.join(PLAIN_DECODERS)}"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"rope parameters {rope}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    for name, child in module.named_modules():
        if name.endswith((*_PROJECTIONS, *_MLP, "lm_head")) and not _is_linear(child):
            return f"{name} is a {type(child).__name__}, not a Linear"
    return None


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a Linear, also where FSDP has made it a unit, and a class of its own."""
    return type(module) is nn.Linear or type(module).__bases__ == (FSDPModule, nn.Linear)


_COPY_UP_TO_BYTES = 2**31

_Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: _Linear
    qk_norm_MD: Tensor | None
    output: _Linear
    mlp_norm_E: Tensor
    gate_up: _Linear
    down: _Linear
    next_norm_E: Tensor
    window: int | None


class FusedRunner:
    """See `Runner`. On a CPU, query, key and value weights are joined into one matrix, gate and up into
    another, and all are copied into the layout of the product's kernels, anew for each weight version.
    Where these copies would be large, and on other devices, the module's own weights are used.

    Raises:
        ConfigError: a model that cannot be split as `split` says.
    """

    def __init__(self, module: nn.Module, max_length: int, split: LayerSplit = WHOLE) -> None:
        config: Any = module.config
        split.check(config)
        self._split = split
        model: Any = module.model
        self.embedding_VE: Tensor = model.embed_tokens.weight.detach()
        self.dtype, self.device = self.embedding_VE.dtype, self.embedding_VE.device
        weights = sum(p.numel() * p.element_size() for p in module.parameters())
        self._copies = self.device.type == "cpu" and weights <= _COPY_UP_TO_BYTES
        self._rounds = self._copies and can_pack(self.embedding_VE)
        heads = self._heads(config, model.rotary_emb, max_length)
        self._ops = make_ops(heads, config.rms_norm_eps)
        self._window = config.sliding_window if config.model_type == "mistral" else None
        layers = model.layers[: config.num_hidden_layers]
        norms = [*(layer.input_layernorm for layer in layers), model.norm]
        self._first_norm_E: Tensor = norms[0].weight.detach()
        self._layers = [self._layer(*parts, heads) for parts in zip(layers, norms[1:], strict=True)]
        self._head_is_split = config.vocab_size % split.size == 0
        head: Any = module.lm_head
        self._head = self._linear(split.outputs(head) if self._head_is_split else WHOLE.outputs(head))
        self.layers = (LayerShape(heads.kv_heads, heads.head_dim, heads.head_dim),) * len(self._layers)

    def _heads(self, config: Any, rotary: nn.Module, max_length: int) -> Heads:
        """The heads, with cos and sin per position from the model's own rotary module."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        own, own_kv = heads // self._split.size, (kv_heads or heads) // self._split.size
        positions = torch.arange(max_length, device=self.device)[None]
        cos_PD, sin_PD = (table[0] for table in rotary(self.embedding_VE[:1, None], positions))
        return Heads(own, own_kv, head_dim, cos_PD, sin_PD, head_dim**-0.5)

    def _layer(self, layer: Any, next_norm: Any, heads: Heads) -> _Layer:
        attention, mlp, split = layer.self_attn, layer.mlp, self._split
        qk_norm = None
        if hasattr(attention, "q_norm"):
            query_norm = attention.q_norm.weight.detach().expand(heads.heads, -1)
            qk_norm = torch.cat((query_norm, attention.k_norm.weight.detach().expand(heads.kv_heads, -1)))
        return _Layer(
            qkv=self._linear(*map(split.outputs, (attention.q_proj, attention.k_proj, attention.v_proj))),
            qk_norm_MD=qk_norm,
            output=self._linear(split.inputs(attention.o_proj)),
            mlp_norm_E=layer.post_attention_layernorm.weight.detach(),
            gate_up=self._linear(split.outputs(mlp.gate_proj), split.outputs(mlp.up_proj)),
            down=self._linear(split.inputs(mlp.down_proj)),
            next_norm_E=next_norm.weight.detach(),
            window=getattr(attention, "sliding_window", self._window),
        )

    def _linear(self, *parts: Weights) -> _Linear:
        """One linear map whose outputs are those of all side by side; they have all a bias or none."""
        weights = [weight for weight, _ in parts]
        biases = [bias for _, bias in parts if bias is not None]
        if not self._copies:
            return _Separate(weights, biases or [None] * len(weights))
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = torch.cat(biases) if biases else None
        return _Packed(pack(weight), bias) if can_pack(weight) else _Separate([weight], [bias])

    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        summed = self._split.summed
        x_RE = F.embedding(self._rounded(step.ids_T), self.embedding_VE)
        normed_RE = self._ops.norm(x_RE, self._first_norm_E)
        for index, layer in enumerate(self._layers):
            query_RND, keys_RHD, values_RHD = self._ops.rotate(
                layer.qkv(normed_RE), step.positions_T, layer.qk_norm_MD
            )
            attention.write(index, step, keys_RHD, values_RHD)
            attended_RND = attention.attend(index, step, query_RND, window=layer.window)
            output_RE = summed(layer.output(attended_RND.flatten(1)))
            x_RE, normed_RE = self._ops.added_norm(x_RE, output_RE, layer.mlp_norm_E)
            down_RE = summed(layer.down(self._ops.gate(layer.gate_up(normed_RE))))
            x_RE, normed_RE = self._ops.added_norm(x_RE, down_RE, layer.next_norm_E)
        wanted_L = step.logits_L
        logits_LV = self._head(normed_RE.index_select(0, self._rounded(wanted_L)))[: wanted_L.shape[0]]
        return self._split.side_by_side(logits_LV) if self._head_is_split else logits_LV

    def _rounded(self, indices: Tensor) -> Tensor:
        """The indices with zeros at the end, so that the step's products have one of few shapes: oneDNN takes
        longer to prepare a kernel for a new number of rows than to run it."""
        count = indices.shape[0]
        rows = rounded_rows(count) if self._rounds else count
        if rows == count:
            return indices
        out = indices.new_zeros(rows)
        out[:count] = indices
        return out


def rounded_rows(rows: int) -> int:
    """The next power of two up to 8; beyond, the next of about eight even steps per doubling."""
    if rows <= 8:
        return 1 << max(rows - 1, 0).bit_length()
    step = max(8, 1 << rows.bit_length() - 4)
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True)
class _Separate:
    """The outputs of linear maps side by side."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]

    def __call__(self, x: Tensor) -> Tensor:
        parts = [linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@dataclass(frozen=True, slots=True)
class _Packed:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.weight, self.bias)
