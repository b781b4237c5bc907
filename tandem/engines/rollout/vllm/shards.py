"""Functions that map vLLM's weights to the checkpoint's names and compute the digest of the weights.

If several ranks split the layers, the digest covers the whole weights of all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from tandem.engines.rollout.vllm.ranks import gather
from tandem.engines.weight_sync import Digest, checksum

_SPLIT = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A tensor of the checkpoint, or the shard of such a tensor on this rank.

    Attributes:
        name: The Hugging Face name.
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

    Layers that vLLM has fused (`qkv_proj`, `gate_up_proj`) are split into the checkpoint's layers. Rows that
    pad the vocabulary are left out. Tied weights are yielded once.
    """
    joined: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    layers: dict[str, Any] = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        if joined.get(last, [last]) != [last]:
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
    """Return the digest of all weights of a vLLM model, keyed by Hugging Face name.

    This function is collective: all ranks must call it. All ranks get the same result. If two ranks have the
    same shard with different content, the digest changes.
    """
    held = list(held_weights(model))
    sums_T = torch.stack(
        [
            checksum(part.tensor, part.first_row, first_column=part.first_column, columns=part.columns)
            for part in held
        ]
    )
    shards_T = torch.tensor([part.shard for part in held])
    total_T = _combine_ranks(*gather(torch.stack((sums_T.cpu(), shards_T))).unbind(1))
    return {part.name: total for part, total in zip(held, total_T.tolist(), strict=True)}


def _combine_ranks(sums_RT: Tensor, shards_RT: Tensor) -> Tensor:
    """Return the sum over all distinct shards, plus the differences between copies of the same shard."""
    total_T = torch.zeros_like(sums_RT[0])
    for rank, (sums_T, shards_T) in enumerate(zip(sums_RT, shards_RT, strict=True)):
        first_T = (shards_RT == shards_T).int().argmax(0)
        of_first_T = sums_RT.gather(0, first_T[None])[0]
        total_T += torch.where(first_T == rank, sums_T, sums_T - of_first_T)
    return total_T
