"""Functions that map vLLM's weights to the names in transformers and compute the digest of the weights.

If several ranks split the layers, the digest covers the whole weights of all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from tandem.engines.rollout.vllm.ranks import gather
from tandem.engines.weight_sync import Digest, checksum

_SPLIT = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
_RENAMED = {
    "ernie4_5_moe": {".gate.e_score": ".gate.moe_statics.e_score"},
    "gpt_oss": {".attn.": ".self_attn.", ".embedding.": ".embed_tokens."},
    "minimax_m2": {".block_sparse_moe.": ".mlp."},
    "mixtral": {".block_sparse_moe.": ".mlp."},
}
"""For a model type, a dict from a part of vLLM's name to that part of the name in transformers."""
_EXPERTS = {"w13": "gate_up_proj", "w2": "down_proj"}
_TURNED = ("gpt_oss", "llama4_text")
"""The model types whose experts multiply by their weights from the left."""


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A tensor of the trainer's model, or a shard of such a tensor on this rank.

    Attributes:
        name: The name in transformers.
        tensor: The whole tensor, or the consecutive rows or columns of the shard.
        shard: The number of the shard. Ranks with the same number have the same shard.
        first_row: The index of the shard's first row in the whole tensor.
        first_column: The index of the shard's first column in the whole tensor.
        columns: The number of columns of the whole tensor. None means as many as the shard has.
    """

    name: str
    tensor: Tensor
    shard: int = 0
    first_row: int = 0
    first_column: int = 0
    columns: int | None = None


def held_weights(model: Any) -> Iterator[HeldWeight]:
    """Yield this rank's weights of a vLLM model, in the same order on all ranks.

    Layers that vLLM has fused (`qkv_proj`, `gate_up_proj`) are split into the layers in transformers. Rows
    that pad the vocabulary are left out. Tied weights are yielded once. If the ranks split the experts of a
    layer, the parts of a weight have the same name.
    """
    renamed = _RENAMED.get(model.config.model_type, {})
    for part in _vllm_weights(model):
        name = part.name
        for theirs, ours in renamed.items():
            name = name.replace(theirs, ours)
        yield replace(part, name=name)


def _vllm_weights(model: Any) -> Iterator[HeldWeight]:
    """Yield the results of `held_weights`, with vLLM's names of the modules."""
    joined: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    layers: dict[str, Any] = dict(model.named_modules())
    kind = model.config.model_type
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        if isinstance(layers[path], RoutedExperts):
            yield from _experts(parent, leaf, layers[path], parameter, kind)
        elif isinstance(layers[path], MLAAttention):
            continue  # derived from kv_b_proj
        elif leaf == "e_score_correction_bias" and kind == "ernie4_5_moe":
            yield HeldWeight(name, parameter[None])
        elif kind == "llama4_text" and last == "qkv_proj" and leaf == "weight":
            for part in _parts(f"{parent}.{{}}.{leaf}", joined[last], layers[path], parameter):
                yield part if "v_proj" in part.name else _in_pairs(part, layers[path].head_size)
        elif joined.get(last, [last]) != [last]:
            yield from _parts(f"{parent}.{{}}.{leaf}", joined[last], layers[path], parameter)
        else:
            yield _held_weight(name, layers[path], parameter)


def _parts(name: str, names: list[str], layer: Any, parameter: Tensor) -> Iterator[HeldWeight]:
    """Yield the checkpoint's weights from which vLLM has built a fused layer.

    Args:
        name: The Hugging Face name of the weights, with {} as a placeholder for one of `names`.
        names: The names of the checkpoint's layers, such as q_proj, k_proj and v_proj.
        layer: The fused layer.
        parameter: The layer's parameter: its weight or its bias.
    """
    rank, size = _place(layer)
    sizes = [rows // size for rows in layer.output_sizes]
    for number, (part, rows) in enumerate(zip(names, torch.split(parameter, sizes), strict=True)):
        # There may be fewer key and value heads than ranks.
        shard = rank // (getattr(layer, "num_kv_head_replicas", 1) if number else 1)
        yield HeldWeight(name.format(part), rows, shard, first_row=shard * len(rows))


def _in_pairs(part: HeldWeight, head: int) -> HeldWeight:
    """Return a weight whose rows in a head alternate between the halves that vLLM's rotary embedding has."""
    rows = part.tensor.view(-1, 2, head // 2, part.tensor.shape[1]).transpose(1, 2)
    return replace(part, tensor=rows.reshape(part.tensor.shape))


def _experts(path: str, leaf: str, layer: Any, parameter: Tensor, kind: str) -> Iterator[HeldWeight]:
    """Yield the parts of a weight or bias of all experts of a layer.

    Args:
        path: The path of the layer in transformers.
        leaf: vLLM's name of the parameter in the layer.
        layer: vLLM's layer.
        parameter: The parameter, (E, rows) or (E, rows, columns).
        kind: The model type.
    """
    inward, what = leaf.split("_")
    name = f"{path}.{_EXPERTS[inward]}" + ("_bias" if what == "bias" else "")
    rank, size = layer.moe_config.tp_rank, layer.moe_config.tp_size
    turned = kind in _TURNED and what == "weight"
    held = parameter.transpose(1, 2) if turned else parameter
    on_first = inward == "w2" and what == "bias"  # the other ranks have zeros
    if size == 1 or on_first:
        yield HeldWeight(name, held, rank)
        return
    split = 1 if (inward == "w13") != turned else held.dim() - 1
    halves = 2 if inward == "w13" and kind != "gpt_oss" else 1
    for half, part in enumerate(held.chunk(halves, split)):
        width = part.shape[split]
        first, whole = (half * size + rank) * width, halves * size * width
        if split == held.dim() - 1:
            yield HeldWeight(name, part, rank, first_column=first, columns=whole)
        else:
            for expert, rows in enumerate(part):
                yield HeldWeight(name, rows, rank, first_row=expert * whole + first)


def _held_weight(name: str, layer: Any, parameter: Tensor) -> HeldWeight:
    rank, size = _place(layer)
    if isinstance(layer, VocabParallelEmbedding):
        first, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        return HeldWeight(name, parameter[: end - first], rank, first_row=first)
    if isinstance(layer, ColumnParallelLinear):
        return HeldWeight(name, parameter, rank, first_row=rank * len(parameter))
    if isinstance(layer, RowParallelLinear) and parameter.dim() > 1:  # every rank has the whole bias
        width = parameter.shape[-1]
        return HeldWeight(name, parameter, rank, first_column=rank * width, columns=size * width)
    return HeldWeight(name, parameter)


def _place(layer: Any) -> tuple[int, int]:
    """Return this rank's index among the ranks that split the layer, and the number of these ranks."""
    return (layer.tp_rank, layer.tp_size) if isinstance(layer, _SPLIT) else (0, 1)


def weights_digest(model: Any) -> Digest:
    """Return the digest of all weights of a vLLM model, keyed by their names in transformers.

    The weights are converted to the dtype of the model's first weight, as in the trainer's digest. This
    function is collective: all ranks must call it. All ranks get the same result. If two ranks have the
    same shard with different content, the digest changes.
    """
    dtype = next(model.parameters()).dtype
    names, shards, sums = [], [], []
    for part in held_weights(model):
        held = part.tensor.to(dtype)
        sums.append(checksum(held, part.first_row, first_column=part.first_column, columns=part.columns))
        names.append(part.name)
        shards.append(part.shard)
    total_T = _combine_ranks(*gather(torch.stack((torch.stack(sums).cpu(), torch.tensor(shards)))).unbind(1))
    found: Digest = {}
    for name, total in zip(names, total_T.tolist(), strict=True):
        found[name] = _signed(found.get(name, 0) + total)
    return found


def _signed(number: int) -> int:
    """Return a number modulo 2^64, as a signed 64-bit number."""
    return (number + 2**63) % 2**64 - 2**63


def _combine_ranks(sums_RT: Tensor, shards_RT: Tensor) -> Tensor:
    """Return the sum over all distinct shards, plus the differences between copies of the same shard."""
    total_T = torch.zeros_like(sums_RT[0])
    for rank, (sums_T, shards_T) in enumerate(zip(sums_RT, shards_RT, strict=True)):
        first_T = (shards_RT == shards_T).int().argmax(0)
        of_first_T = sums_RT.gather(0, first_T[None])[0]
        total_T += torch.where(first_T == rank, sums_T, sums_T - of_first_T)
    return total_T
