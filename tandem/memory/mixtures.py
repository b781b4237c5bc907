"""The experts of a model's layers, as its config.json describes them.

Architectures name the same sizes differently. A layer is a mixture of experts, or has an ordinary MLP. A
mixture may have shared experts, which compute every token like an ordinary MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.model import EXPERT_COUNTS
from tandem.memory.activations import Experts


@dataclass(frozen=True, slots=True)
class Mixture:
    """The MLPs of a model with experts.

    Attributes:
        experts: the routed experts of a mixture.
        shared: the total width of the experts of a mixture that compute every token.
        plain: the number of layers with an ordinary MLP.
        width: the width of that MLP.
    """

    experts: Experts
    shared: int
    plain: int
    width: int


def mixture_of(text: Mapping[str, Any]) -> Mixture | None:
    """Return the mixture of a model, or None if it has no experts.

    Args:
        text: the fields of the language model's config.json. The number of layers and the width of the MLP
            are there.
    """
    number = _first(text, *EXPERT_COUNTS)
    if not number:
        return None
    inner, layers = text["intermediate_size"], text["num_hidden_layers"]
    width = _first(text, "moe_intermediate_size") or inner
    routed = min(number, _first(text, "num_experts_per_tok", "moe_k") or 1)
    shared = _first(text, "shared_expert_intermediate_size")
    shared = shared or width * _first(text, "n_shared_experts", "moe_num_shared_experts")
    if text.get("model_type") == "llama4_text":  # all its experts compute all tokens, and one more is shared
        routed, shared = number, width
    plain = layers - sum(_has_experts(text, layer) for layer in range(layers))
    experts = Experts(number, routed, width, gated="shared_expert_intermediate_size" in text)
    return Mixture(experts, shared, plain, _first(text, "intermediate_size_mlp") or inner)


def _has_experts(text: Mapping[str, Any], layer: int) -> bool:
    kinds, listed = text.get("mlp_layer_types"), text.get("moe_layers")
    if kinds is not None or listed is not None:
        return kinds[layer] == "sparse" if kinds is not None else layer in (listed or ())
    first = _first(text, "first_k_dense_replace", "moe_layer_start_index")
    last = _first(text, "moe_layer_end_index") or -1
    step = _first(text, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval") or 1
    within = first <= layer <= last % text["num_hidden_layers"]
    return within and (layer + 1) % step == 0 and layer not in (text.get("mlp_only_layers") or ())


def _first(text: Mapping[str, Any], *names: str) -> int:
    """Return the first whole number among the fields; 0 if there is none."""
    found = (text.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value), 0)
