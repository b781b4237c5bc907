"""The weights that a step of the fused runner reads: where they are in a model, and copies of them, in which
those that are multiplied by the same inputs lie side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.engines.rollout.native.lasting import Lasting
from tandem.engines.rollout.native.split import WHOLE, LayerSplit, Weights

Place = tuple[int, torch.Size, torch.dtype]
"""Where a tensor lies, and as what: what a CUDA graph depends on."""


class Part(NamedTuple):
    """A rank's share of a parameter.

    Attributes:
        name: the parameter's, by Hugging Face.
        tensor: an alias of the model's; of a norm per head, with one row for each head.
    """

    name: str
    tensor: Tensor


Parts = dict[str, list[Part]]
"""By the name of what a step reads, its parts, joined by rows; `NAME.bias` is the bias of NAME."""


def parts_of(module: Any, split: LayerSplit) -> Parts:
    """The weights of a model of the Llama family. "head" is missing where it is the embedding."""
    config, model, out = module.config, module.model, Parts()
    _add(out, "embedding", ("model.embed_tokens", (model.embed_tokens.weight.detach(), None)))
    for index, layer in enumerate(model.layers[: config.num_hidden_layers]):
        path = f"model.layers.{index}"
        _add_layer(out, layer, path, config, split)
    _add(out, "norm", ("model.norm", (model.norm.weight.detach(), None)))
    head = module.lm_head
    share = split if head_is_split(config, split) else WHOLE
    if (
        share.size > 1
        or head.bias is not None
        or head.weight.data_ptr() != model.embed_tokens.weight.data_ptr()
    ):
        _add(out, "head", ("lm_head", share.outputs(head)))
    return out


def head_is_split(config: Any, split: LayerSplit) -> bool:
    """Whether each rank has a share of the vocabulary."""
    return bool(config.vocab_size % split.size == 0)


def _add_layer(out: Parts, layer: Any, path: str, config: Any, split: LayerSplit) -> None:
    attention, mlp = layer.self_attn, layer.mlp

    def outputs(owner: Any, at: str, *names: str) -> list[tuple[str, Weights]]:
        return [(f"{path}.{at}.{name}", split.outputs(getattr(owner, name))) for name in names]

    _add(out, f"{path}.qkv", *outputs(attention, "self_attn", "q_proj", "k_proj", "v_proj"))
    _add(out, f"{path}.output", (f"{path}.self_attn.o_proj", split.inputs(attention.o_proj)))
    _add(out, f"{path}.gate_up", *outputs(mlp, "mlp", "gate_proj", "up_proj"))
    _add(out, f"{path}.down", (f"{path}.mlp.down_proj", split.inputs(mlp.down_proj)))
    for name in ("input_layernorm", "post_attention_layernorm"):
        _add(out, f"{path}.{name}", (f"{path}.{name}", (getattr(layer, name).weight.detach(), None)))
    if hasattr(attention, "q_norm"):
        heads = config.num_attention_heads
        counts = (heads // split.size, (config.num_key_value_heads or heads) // split.size)
        out[f"{path}.qk_norm"] = [
            Part(
                f"{path}.self_attn.{name}.weight", getattr(attention, name).weight.detach().expand(count, -1)
            )
            for name, count in zip(("q_norm", "k_norm"), counts, strict=True)
        ]


def _add(out: Parts, key: str, *maps: tuple[str, Weights]) -> None:
    """Adds what maps of the same inputs give side by side; they have all a bias or none."""
    out[key] = [Part(f"{name}.weight", weight) for name, (weight, _) in maps]
    biases = [Part(f"{name}.bias", bias) for name, (_, bias) in maps if bias is not None]
    if biases:
        out[f"{key}.bias"] = biases


def places(tensors: Iterable[Tensor]) -> tuple[Place, ...]:
    """Where these tensors lie now."""
    return tuple((tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors)


class Copies:
    """Copies of a model's weights, each of several side by side. They stay where they are when they are
    filled anew.

    Args:
        parts: the first to be copied.

    Attributes:
        joined: by the names of `parts`.
        memory: where they lie.
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
        """Copies other weights of the same shapes and types over those that are there.

        Returns:
            Whether they have these shapes and types; else nothing changes.
        """
        if _shapes(parts) != self._shapes:
            return False
        self.memory.take()
        self._copy(parts)
        return True

    @torch.no_grad()
    def _copy(self, parts: Parts) -> None:
        for (_, target), part in zip(self._pieces(parts), chain(*parts.values()), strict=True):
            target.copy_(part.tensor)

    def _pieces(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """The name of each part, and the rows that it has here."""
        for key, each in parts.items():
            rows = torch.split(self.joined[key], [len(part.tensor) for part in each])
            yield from zip((part.name for part in each), rows, strict=True)

    def named(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """The copies by the names of the parameters, of a model that is not split."""
        for name, rows in self._pieces(parts):
            yield name, rows[0] if name.endswith(("q_norm.weight", "k_norm.weight")) else rows


def _shapes(parts: Parts) -> dict[str, list[tuple[torch.Size, torch.dtype]]]:
    return {key: [(part.tensor.shape, part.tensor.dtype) for part in each] for key, each in parts.items()}


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers, those that have several names once."""
    return [*module.parameters(), *module.buffers()]
