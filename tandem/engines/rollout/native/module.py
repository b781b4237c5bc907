"""The runner for every causal LM whose attention uses transformers' attention interface.

The runner calls the model's forward with all tokens of a step as one row. A special attention function reads
and writes the paged KV cache. The layer's mask says which window or chunk the layer has, and brings the call
of the step; see `tandem.models.masks`.

The shape suffixes of `paged` apply. A leading 1 is the dimension of the single row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.engines.rollout.borrowed import borrowed
from tandem.engines.rollout.native.attention import Attention
from tandem.engines.rollout.native.mixture import PACK_UP_TO_BYTES, packed_experts, replaced
from tandem.engines.rollout.native.paged import LayerShape, Sight, StepInput
from tandem.engines.rollout.native.weights import weight_bytes
from tandem.errors import EngineError
from tandem.models.angles import AngleTables
from tandem.models.attention import by_position
from tandem.models.masks import Mask, attending, register_attention
from tandem.models.routing import NO_MIXTURES, Mixtures, Routing

_ATTENTION = "tandem_rollout"
_UNSUPPORTED = ("position_bias",)
_REMEDY = "use rollout.name=hf for this model"
_Call = Callable[..., Tensor]
"""Computes attention from (layer, query (T, N, D), keys (T, H, D), values, sight)."""


class _Tokens(NamedTuple):
    """The tokens of a step: their positions, and the function that computes their attention."""

    positions_T: Tensor
    call: _Call


class ModuleRunner:
    """A runner that calls the module's forward (see `Runner`).

    On a CPU, it has packed copies of the weights of experts, unless the model is large.

    Args:
        module: The model.
        max_length: The maximum number of tokens of a sequence.
        records: Whether to record the choice of experts.

    Raises:
        ModelError: The choice of experts cannot be recorded.
        EngineError: A layer's attention does not use the interface, or needs more than plain keys and values.
            Or the rotary angles change with each further token.
    """

    copies = False
    records: Mixtures | None = None
    record_bytes = 0

    def __init__(self, module: nn.Module, max_length: int, *, records: bool = False) -> None:
        self._module = module
        config = module.config.get_text_config()  # type: ignore[union-attr, operator]
        _check(config, max_length)
        embedding = module.get_input_embeddings().weight  # type: ignore[operator]
        self.dtype, self.device = embedding.dtype, embedding.device
        self.weight_bytes = weight_bytes(module.parameters())
        self._pack()
        found: list[tuple[int, LayerShape]] = []

        def record_shape(
            layer: int, query_TND: Tensor, keys_THD: Tensor, values_THD: Tensor, sight: Sight
        ) -> Tensor:
            """Record the shape of a layer's keys and values, and return the attention output of one token.

            With only one token, the attention output is the token's value.
            """
            shape = (keys_THD.shape[1], keys_THD.shape[2], values_THD.shape[2])
            found.append((layer, LayerShape(*shape, sight.window_of(max_length))))
            return values_THD.repeat_interleave(query_TND.shape[1] // values_THD.shape[1], 1)

        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        if records:
            self.records = getattr(module, "mixtures", NO_MIXTURES)
        with torch.no_grad():
            self._angles = AngleTables(module, max_length, embedding)
            _, experts_TLK = self._forward(zero, zero, zero, zero, record_shape)
        self.angle_limits = self._angles.limits
        layers = range(config.num_hidden_layers)
        if sorted(layer for layer, _ in found) != list(layers):
            raise _refusal(
                "not every layer uses transformers' attention interface, once in a forward",
                got=f"{type(module).__name__}: {len(found)} calls from {len(layers)} layers",
            )
        self.layers = tuple(shape for _, shape in sorted(found))
        if experts_TLK is not None:
            self.record_bytes = experts_TLK.nbytes
            if all(shape.window for shape in self.layers):  # the records need blocks that stay
                self.layers = tuple(shape._replace(window=0) for shape in self.layers)

    def renew(self, module: nn.Module) -> bool:
        """Return whether `module` is the module that this runner calls (see `Runner`)."""
        embedding = module.get_input_embeddings().weight  # type: ignore[operator]
        same = module is self._module and embedding.dtype == self.dtype
        if same:
            self._pack()
        return same

    def _pack(self) -> None:
        few = self.weight_bytes <= PACK_UP_TO_BYTES
        self._experts = packed_experts(self._module) if few else []

    def release_weights(self) -> bool:
        """Do nothing, because the packed copies go with the runner (see `Runner`)."""
        return False

    def reads(self) -> Sequence[Tensor]:
        """Return the tensors that a forward reads (see `Runner`)."""
        others = (part for part in self._module.modules() if part not in self._angles.modules)
        buffers = (buffer for part in others for buffer in part.buffers(recurse=False))
        return [*self._module.parameters(), *buffers, *self._angles.tables]

    def copied(self, module: nn.Module) -> Iterator[tuple[str, Tensor]] | None:
        """Return None, because this runner has no copies of weights (see `Runner`)."""
        return None

    def forward(self, step: StepInput, attention: Attention) -> Tensor:
        def paged(
            layer: int, query_TND: Tensor, keys_THD: Tensor, values_THD: Tensor, sight: Sight
        ) -> Tensor:
            attention.write(layer, step, keys_THD, values_THD)
            return attention.attend(layer, step, query_TND, sight)

        logits, experts_TLK = self._forward(step.ids_T, step.positions_T, step.levels_T, step.logits_L, paged)
        if experts_TLK is not None:
            attention.cache.record(step, experts_TLK)
        return logits

    def _forward(
        self, ids_T: Tensor, positions_T: Tensor, levels_T: Tensor, logits_L: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits, and (T, L, K) the experts if they are recorded."""
        mixtures, routing = self.records or NO_MIXTURES, Routing(records=True)
        angles, tokens = self._angles.used(levels_T), _Tokens(positions_T, call)
        with (
            borrowed(self._module, _ATTENTION),
            attending(tokens),
            angles,
            replaced(self._experts),
            mixtures.active(routing),
        ):
            out = self._module(
                input_ids=ids_T[None],
                position_ids=positions_T[None],
                attention_mask=torch.ones_like(ids_T[None], dtype=torch.bool),
                use_cache=False,
                logits_to_keep=logits_L,
            )
        logits: Tensor = out.logits[0]
        return logits, None if self.records is None else mixtures.recorded(routing)


def _attention(
    layer: Any,
    query_1NTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' attention interface.

    The function returns the output (1, T, N, value_dim), and None instead of attention weights.
    """
    unsupported = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if not isinstance(attention_mask, Mask):
        unsupported.append("a mask that is not one of transformers.masking_utils")
    if unsupported:
        raise _refusal(f"this model's attention uses {', '.join(unsupported)}", got=type(layer).__name__)
    query_1NTD = by_position(layer, query_1NTD, attention_mask.tokens.positions_T)
    query_TND, keys_THD, values_THD = (part[0].transpose(0, 1) for part in (query_1NTD, key_1HTD, value_1HTD))
    query_TND = query_TND * (query_TND.shape[-1] ** -0.5 if scaling is None else scaling)
    sight = Sight(attention_mask.window, attention_mask.chunk, softcap or 0.0, s_aux)
    out_TND: Tensor = attention_mask.tokens.call(layer.layer_idx, query_TND, keys_THD, values_THD, sight)
    return out_TND[None], None


def _check(config: Any, max_length: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [part for part in rope.values() if isinstance(part, dict)]
    for part in by_layer or [rope]:
        if part.get("rope_type") != "dynamic":
            continue
        limit = part.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_length > limit:
            raise _refusal(
                "beyond their limit, the model's rotary angles change with each further token",
                got=f"rope type dynamic and sequences of up to {max_length} tokens",
                expected=f"at most {limit} tokens",
                remedy=f"{_REMEDY}, or use shorter sequences",
            )


def _refusal(message: str, *, got: str, expected: str | None = None, remedy: str = _REMEDY) -> EngineError:
    field = "actor_rollout_ref.rollout.name"
    return EngineError(message, field=field, got=got, expected=expected, remedy=remedy)


register_attention(_ATTENTION, _attention)
