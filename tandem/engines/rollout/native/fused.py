"""A fast forward for transformers models of the Llama family.

The models Llama, Mistral, Qwen2 and Qwen3 are supported, and mixtures with the same attention. The forward
uses the model's parameters and computes the same arithmetic as the module, without the module's Python
overhead per layer.

Shape suffixes as in `paged` and `ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tandem.config.model import PLAIN_DECODERS
from tandem.engines.rollout.native.attention import Attention
from tandem.engines.rollout.native.mixture import MLP, PACK_UP_TO_BYTES, mixtures_of
from tandem.engines.rollout.native.ops import make_ops
from tandem.engines.rollout.native.ops.base import Heads
from tandem.engines.rollout.native.paged import LayerShape, Sight, StepInput
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.engines.rollout.native.weights import MAPS, Copies, head_is_split, parts_of, places, weight_bytes
from tandem.models.linear import can_pack, linear, pack, packed_linear
from tandem.models.routing import Routing

_ROPE_TYPES = (
    "default",
    "linear",
    "llama3",
    "yarn",
)  # rotary types whose angles depend only on the position
_MIXTURES = (
    *("dots1", "glm4_moe", "hy_v3", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    "solar_open",
)
_KINDS = (*PLAIN_DECODERS, *_MIXTURES)
_PRODUCTS = (*(name for names in MAPS.values() for name in names), "lm_head")


def why_not_fused(module: nn.Module) -> str | None:
    """Return the reason why `FusedRunner` does not support the model, or None if it does."""
    config: Any = module.config
    if config.model_type not in _KINDS:
        return f"model type {config.model_type} is not one of {', '.join(_KINDS)}"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in _ROPE_TYPES:
        return f"rope parameters {rope} are not supported"
    if getattr(config, "clip_qkv", None) is not None:
        return "clip_qkv is not supported"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act} is not supported"
    for name, child in module.named_modules():
        # FSDP replaces the class of each unit by a subclass.
        plain = type(child) is nn.Linear or type(child).__bases__ == (FSDPModule, nn.Linear)
        if name.endswith(_PRODUCTS) and not plain:
            return f"{name} is a {type(child).__name__}, not a Linear"
    return None


_Held = Mapping[str, Sequence[Tensor]]  # keyed by the names of `parts_of`


@dataclass(frozen=True, slots=True)
class _Linear:
    """One or several linear layers with the same inputs, whose outputs are concatenated."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.weights) == 1:  # no list is built, because this runs for every linear layer in every step
            return self.product(x, self.weights[0], self.biases[0])
        maps = zip(self.weights, self.biases, strict=True)
        return torch.cat([self.product(x, weight, bias) for weight, bias in maps], -1)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: _Linear
    qk_norm_MD: Tensor | None
    output: _Linear
    mlp_norm_E: Tensor
    mlp: MLP
    next_norm_E: Tensor
    sight: Sight
    wide_norms: tuple[Tensor, Tensor] | None  # of all queries of a token together, and of all its keys


class FusedRunner:
    """A runner for models of the Llama family (see `Runner`).

    Copies of the query, key and value weights can be joined into one matrix, and copies of the gate and up
    weights into another. On a CPU, each weight version is copied into the layout of the kernels. If these
    copies would be large, the module's weights are used instead. On other devices, the argument `copies`
    decides.

    Args:
        module: The model.
        max_length: The maximum number of tokens of a sequence.
        split: This rank's shard of each layer.
        copies: Whether the runner has its own copies of all weights. New weights are then copied to the same
            addresses, and the runner uses no tensor of the module. On a CPU only tests set this.
        records: Whether to record the choice of experts.

    Raises:
        ConfigError: The model's layers cannot be split as `split` requires.
    """

    angle_limits: tuple[int, ...] = ()

    def __init__(
        self,
        module: nn.Module,
        max_length: int,
        split: LayerSplit = WHOLE,
        *,
        copies: bool = False,
        records: bool = False,
    ) -> None:
        config: Any = module.config
        split.check(config)
        self._split, self._config = split, config.to_dict()
        parts = parts_of(module, split)
        self.copies = copies
        self._copies = Copies(parts) if copies else None
        held = {key: [part.tensor for part in each] for key, each in parts.items()}
        if self._copies is not None:
            held = {key: [joined] for key, joined in self._copies.joined.items()}
        self._reads = [tensor for each in held.values() for tensor in each]
        self.weight_bytes = weight_bytes(self._reads)
        [self.embedding_VE] = held["embedding"]
        self.dtype, self.device = self.embedding_VE.dtype, self.embedding_VE.device
        whole = weight_bytes(module.parameters())
        self._joins = self.device.type == "cpu" and whole <= PACK_UP_TO_BYTES and not copies
        self._rounds = self._joins and can_pack(self.embedding_VE)
        model: Any = module.model
        heads = self._heads(config, model.rotary_emb, max_length)
        self._ops = make_ops(heads, config.rms_norm_eps)
        window = config.sliding_window if config.model_type in ("mistral", "mixtral") else None
        layers = model.layers[: config.num_hidden_layers]
        names = [f"model.layers.{index}" for index in range(len(layers))]
        norms = [*(f"{name}.input_layernorm" for name in names), "norm"]
        [self._first_norm_E] = held[norms[0]]
        self._norms: dict[str, Tensor] = {}  # norm weights of all heads, concatenated
        self.mixtures, self._mlps = mixtures_of(module, held, self._ops.gate, packs=self._rounds)
        self.records = self.mixtures if records else None
        self.record_bytes = records * self.mixtures.record_bytes
        self._layers = [
            self._layer(held, name, next_norm, getattr(layer.self_attn, "sliding_window", window) or 0)
            for name, next_norm, layer in zip(names, norms[1:], layers, strict=True)
        ]
        self._head_is_split = head_is_split(config, split)
        self._head = self._linear(held, "head" if "head" in held else "embedding")
        shape = (heads.kv_heads, heads.head_dim, heads.head_dim)
        windows = [layer.sight.window_of(max_length) for layer in self._layers]
        if records and all(windows):
            windows = [0] * len(windows)  # the records need blocks that stay
        self.layers = tuple(LayerShape(*shape, window) for window in windows)

    def _heads(self, config: Any, rotary: nn.Module, max_length: int) -> Heads:
        """Return the layout of the heads, with cos and sin tables from the model's rotary module."""
        heads, kv_heads = self._split.heads(config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        positions = torch.arange(max_length, device=self.device)[None]
        cos_PD, sin_PD = (table[0] for table in rotary(self.embedding_VE[:1, None], positions))
        rotated = cos_PD.shape[1]
        cos_PD, sin_PD = (
            F.pad(table, (0, head_dim - rotated), value=at_rest).contiguous()
            for table, at_rest in ((cos_PD, 1.0), (sin_PD, 0.0))
        )
        return Heads(heads, kv_heads, head_dim, cos_PD, sin_PD, head_dim**-0.5, rotated)

    def _layer(self, held: _Held, name: str, next_norm: str, window: int) -> _Layer:
        if f"{name}.qk_norm" in held:
            self._norms[f"{name}.qk_norm"] = _joined(held[f"{name}.qk_norm"])
        [mlp_norm_E], [next_norm_E] = held[f"{name}.post_attention_layernorm"], held[next_norm]
        return _Layer(
            qkv=self._linear(held, f"{name}.qkv"),
            output=self._linear(held, f"{name}.output"),
            mlp=self._mlps.get(name) or self._dense(held, name),
            qk_norm_MD=self._norms.get(f"{name}.qk_norm"),
            mlp_norm_E=mlp_norm_E,
            next_norm_E=next_norm_E,
            sight=Sight(window),
            wide_norms=(held[f"{name}.q_norm"][0], held[f"{name}.k_norm"][0])
            if f"{name}.q_norm" in held
            else None,
        )

    def _dense(self, held: _Held, name: str) -> MLP:
        gate_up, down = (self._linear(held, f"{name}.{key}") for key in ("gate_up", "down"))
        return lambda x_RE: down(self._ops.gate(gate_up(x_RE)))

    def _linear(self, held: _Held, name: str) -> _Linear:
        """Return all linear layers with this name as one `_Linear`.

        Either all these layers have a bias, or none has.
        """
        weights, biases = held[name], held.get(f"{name}.bias", [])
        if self._joins:
            weights, biases = [_joined(weights)], [_joined(biases)] if biases else []
        packed = self._joins and can_pack(weights[0])
        if packed:
            weights = [pack(weights[0])]
        return _Linear(weights, biases or [None] * len(weights), packed_linear if packed else linear)

    def renew(self, module: nn.Module) -> bool:
        """Switch to the module's current weights (see `Runner`)."""
        config: Any = module.config
        if self._joins or config.to_dict() != self._config:
            return False
        parts = parts_of(module, self._split)
        if self._copies is not None:
            return self._copies.fill(parts)
        if places(part.tensor for each in parts.values() for part in each) != places(self._reads):
            return False
        for name, joined in self._norms.items():
            torch.cat([part.tensor for part in parts[name]], out=joined)
        return True

    def release_weights(self) -> bool:
        """Free the memory of the copies (see `Runner`)."""
        return self._copies is not None and self._copies.memory.give_back()

    def reads(self) -> Sequence[Tensor]:
        """Return the tensors that a forward reads (see `Runner`)."""
        return self._reads

    def copied(self, module: nn.Module) -> Iterator[tuple[str, Tensor]] | None:
        """Yield name and tensor of the runner's copies (see `Runner`)."""
        return None if self._copies is None else self._copies.named(parts_of(module, self._split))

    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        if self.records is None:
            return self._forward(step, attention)
        routing = Routing(records=True)
        with self.records.active(routing):
            logits_LV = self._forward(step, attention)
        attention.cache.record(step, self.records.recorded(routing)[: len(step.ids_T)])
        return logits_LV

    def _forward(self, step: StepInput, attention: Attention) -> Tensor:
        summed = self._split.summed
        x_RE = F.embedding(self._rounded(step.ids_T), self.embedding_VE)
        x_RE, normed_RE = self._ops.norm(x_RE, None, self._first_norm_E)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(normed_RE)
            if layer.wide_norms is not None:
                qkv = self._wide_norms(qkv, layer.wide_norms)
            query_RND, keys_RHD, values_RHD = self._ops.rotate(qkv, step.positions_T, layer.qk_norm_MD)
            attention.write(index, step, keys_RHD, values_RHD)
            attended_RND = attention.attend(index, step, query_RND, layer.sight)
            output_RE = summed(layer.output(attended_RND.flatten(1)))
            x_RE, normed_RE = self._ops.norm(x_RE, output_RE, layer.mlp_norm_E)
            x_RE, normed_RE = self._ops.norm(x_RE, summed(layer.mlp(normed_RE)), layer.next_norm_E)
        wanted_L = step.logits_L
        logits_LV = self._head(normed_RE.index_select(0, self._rounded(wanted_L)))[: wanted_L.shape[0]]
        return self._split.side_by_side(logits_LV) if self._head_is_split else logits_LV

    def _wide_norms(self, qkv: Tensor, norms: tuple[Tensor, Tensor]) -> Tensor:
        widths = [len(weight) for weight in norms]
        *parts, values = torch.split(qkv, [*widths, qkv.shape[1] - sum(widths)], 1)
        pairs = zip(parts, norms, strict=True)
        normed = [self._ops.norm(part.contiguous(), None, weight)[1] for part, weight in pairs]
        return torch.cat((*normed, values), 1)

    def _rounded(self, indices: Tensor) -> Tensor:
        """Return the indices, padded with zeros at the end to the length `rounded_rows`.

        The matrix products then have only a few different shapes. oneDNN needs more time to prepare a kernel
        for a new number of rows than to run the kernel.
        """
        count = indices.shape[0]
        rows = rounded_rows(count) if self._rounds else count
        return indices if rows == count else F.pad(indices, (0, rows - count))


def rounded_rows(rows: int) -> int:
    """Round up a number of rows: to a power of two up to 8, then to one of eight steps per doubling."""
    if rows <= 8:
        return 1 << max(rows - 1, 0).bit_length()
    step = max(8, 1 << rows.bit_length() - 4)
    return -(-rows // step) * step


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
