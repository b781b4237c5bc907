"""Functions and classes for the weights that the fused runner reads.

These weights are the model's tensors, or copies of the tensors. In the copies, weights of layers with the
same inputs are concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.engines.rollout.native.lasting import Lasting
from tandem.engines.rollout.native.split import WHOLE, LayerSplit, Weights

Place = tuple[int, torch.Size, torch.dtype]
"""The address, shape and dtype of a tensor, on which a CUDA graph depends."""


class Part(NamedTuple):
    """This rank's shard of a model parameter.

    Attributes:
        name: The parameter's Hugging Face name; None for a buffer.
        tensor: A view of the model's tensor. The weight of a norm over each head has one row per head.
    """

    name: str | None
    tensor: Tensor


Parts = dict[str, list[Part]]
"""A dict from the name of a weight to its parts, whose rows are concatenated.

The bias of NAME has the name `NAME.bias`.
"""


ATTENTION_MAPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
}
MAPS = {**ATTENTION_MAPS, "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}
"""The linear layers of a decoder layer. Linear layers with the same inputs are joined under one name."""

_SPLIT_BY_INPUTS = ("output", "down")


def parts_of(module: Any, split: LayerSplit) -> Parts:
    """Return this rank's weights of a model of the Llama family.

    The tensors of a mixture are not split, and have their names in the model as keys. The key "head" is
    missing if the language model head is tied to the embedding.
    """
    config, model, head = module.config, module.model, module.lm_head
    out = Parts(embedding=[_weight("model.embed_tokens", model.embed_tokens)])
    for index, layer in enumerate(model.layers[: config.num_hidden_layers]):
        path = f"model.layers.{index}"
        mixture = is_mixture(layer.mlp)
        head_dim = layer.self_attn.head_dim
        for key, names in (ATTENTION_MAPS if mixture else MAPS).items():
            share = split.inputs if key in _SPLIT_BY_INPUTS else split.outputs
            maps = {f"{path}.{name}": share(layer.get_submodule(name)) for name in names}
            _add(out, f"{path}.{key}", maps)
        if mixture:
            named = layer.mlp.named_parameters(f"{path}.mlp")
            out |= {name: [Part(name, weight.detach())] for name, weight in named}
            out |= {name: [Part(None, each)] for name, each in layer.mlp.named_buffers(f"{path}.mlp")}
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{path}.{name}"] = [_weight(f"{path}.{name}", getattr(layer, name))]
        if hasattr(layer.self_attn, "q_norm") and len(layer.self_attn.q_norm.weight) != head_dim:
            for name in ("q_norm", "k_norm"):
                out[f"{path}.{name}"] = [_weight(f"{path}.self_attn.{name}", getattr(layer.self_attn, name))]
        elif hasattr(layer.self_attn, "q_norm"):
            norms = zip(("self_attn.q_norm", "self_attn.k_norm"), split.heads(config), strict=True)
            out[f"{path}.qk_norm"] = [
                _weight(f"{path}.{name}", layer.get_submodule(name), rows=count) for name, count in norms
            ]
    out["norm"] = [_weight("model.norm", model.norm)]
    head_split = split if head_is_split(config, split) else WHOLE
    tied = head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    if not tied or head_split.size > 1 or head.bias is not None:
        _add(out, "head", {"lm_head": head_split.outputs(head)})
    return out


def is_mixture(mlp: nn.Module) -> bool:
    """Return whether a layer's MLP is a mixture of experts."""
    return hasattr(mlp, "experts")


def head_is_split(config: Any, split: LayerSplit) -> bool:
    """Return whether the language model head is split over the ranks by vocabulary."""
    return bool(config.vocab_size % split.size == 0)


def _weight(path: str, owner: Any, rows: int | None = None) -> Part:
    """Return a module's whole weight. With `rows`, the weight is repeated as `rows` equal rows."""
    weight = owner.weight.detach()
    return Part(f"{path}.weight", weight if rows is None else weight.expand(rows, -1))


def _add(out: Parts, key: str, maps: Mapping[str, Weights]) -> None:
    """Add linear layers with the same inputs under one key. Their outputs are concatenated.

    Either all these layers have a bias, or none has.
    """
    out[key] = [Part(f"{name}.weight", weight) for name, (weight, _) in maps.items()]
    biases = [Part(f"{name}.bias", bias) for name, (_, bias) in maps.items() if bias is not None]
    if biases:
        out[f"{key}.bias"] = biases


def places(tensors: Iterable[Tensor]) -> tuple[Place, ...]:
    """Return the current addresses, shapes and dtypes of the tensors."""
    return tuple((tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors)


class Copies:
    """Copies of a model's weights. The weights of layers with the same inputs are concatenated.

    The copies keep their addresses when new weights are copied into them.

    Args:
        parts: The first weights to copy.

    Attributes:
        joined: The copies, keyed by the names of `parts`.
        memory: The memory of the copies.
    """

    def __init__(self, parts: Parts) -> None:
        self._shapes = _shapes(parts)
        specs = [
            ((sum(len(part.tensor) for part in each), *each[0].tensor.shape[1:]), each[0].tensor.dtype)
            for each in parts.values()
        ]
        self.memory = Lasting(specs, parts["embedding"][0].tensor.device)
        self.joined = dict(zip(parts, self.memory.tensors, strict=True))
        self._copy(parts)

    def fill(self, parts: Parts) -> bool:
        """Overwrite the copies with new weights of the same shapes and dtypes.

        Returns:
            Whether the shapes and dtypes are the same. If not, the copies do not change.
        """
        if _shapes(parts) != self._shapes:
            return False
        self.memory.take()
        self._copy(parts)
        return True

    @torch.no_grad()
    def _copy(self, parts: Parts) -> None:
        for part, rows in self._pieces(parts):
            rows.copy_(part.tensor)

    def _pieces(self, parts: Parts) -> Iterator[tuple[Part, Tensor]]:
        """Yield each part and the rows of the copies that belong to the part."""
        for key, each in parts.items():
            rows = torch.split(self.joined[key], [len(part.tensor) for part in each])
            yield from zip(each, rows, strict=True)

    def named(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """Yield the copies with the names of the model's parameters. The model must not be split."""
        repeated = {part.name for key, each in parts.items() if key.endswith(".qk_norm") for part in each}
        for (name, _), rows in self._pieces(parts):
            if name is not None:
                yield name, rows[0] if name in repeated else rows


def _shapes(parts: Parts) -> dict[str, list[tuple[torch.Size, torch.dtype]]]:
    return {key: [(part.tensor.shape, part.tensor.dtype) for part in each] for key, each in parts.items()}


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
