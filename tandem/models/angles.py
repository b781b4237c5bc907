"""Rotary angles that depend on a sequence's length, for sequences that are packed into one row.

With rope types "longrope" and "dynamic", transformers chooses the angles of a whole batch by its longest
sequence. Here each sequence gets the angles that it has alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tandem.models.masks import attended
from tandem.models.packing import Packing

BY_LENGTH = ("dynamic", "longrope")
"""The rope types whose angles depend on the length of the sequence."""


def fit_angles(model: nn.Module) -> None:
    """Make the rotary embeddings of a model follow the length of each packed sequence, in place."""
    for module in model.modules():
        if set(_kinds(module).values()) & set(BY_LENGTH):
            module.forward = partial(_by_length, module)


def forget_lengths(model: nn.Module) -> None:
    """Set the angles of a model of transformers to those of short sequences.

    With rope type "dynamic", transformers would otherwise keep the angles of an earlier, longer sequence.
    """
    for module in model.modules():
        for layer_type, kind in _kinds(module).items():
            if kind == "dynamic":
                _reset(module, layer_type)


def _kinds(module: Any) -> dict[str | None, str]:
    """Return the rope types of a rotary embedding by type of layer; None: all layers."""
    kinds = getattr(module, "rope_type", None) or {}
    return kinds if isinstance(kinds, dict) else {None: kinds}


def _by_length(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """Return the angles of the packed tokens, computed once for each length that makes a difference."""
    kind = _kinds(module)[layer_type]
    kinds = {} if layer_type is None else {"layer_type": layer_type}
    plain, packing = type(module).forward, attended()
    if kind not in BY_LENGTH or not isinstance(packing, Packing):
        return plain(module, x, position_ids, **kinds)
    own = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
    limit = own["original_max_position_embeddings"] if kind == "longrope" else module.original_max_seq_len
    longest = (
        limit + 1 if kind == "longrope" else max(packing.whole_lengths)
    )  # all longer ones have equal angles
    found: Any = None
    for length in sorted({min(max(length, limit), longest) for length in packing.whole_lengths}):
        if kind == "dynamic":
            _reset(module, layer_type)
        # transformers takes the largest position for the length, so one more position is appended.
        positions = (
            position_ids if length > limit and kind == "longrope" else position_ids.clamp(max=length - 1)
        )
        positions = torch.cat([positions, positions.new_full((len(positions), 1), length - 1)], 1)
        made = plain(module, x, positions, **kinds)
        made = tuple(part[:, :-1] for part in made) if isinstance(made, tuple) else made[:, :-1]
        found = made if found is None else _chosen(packing.whole_lengths_here() >= length, made, found)
    return found


def _reset(module: Any, layer_type: str | None) -> None:
    """Set the angles to those of short sequences. Otherwise a longer sequence's angles would stay."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    original = getattr(module, f"{prefix}original_inv_freq")
    held = getattr(module, f"{prefix}inv_freq")
    setattr(module, f"{prefix}inv_freq", original.to(held.device))
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _chosen(chosen_N: Tensor, first: Any, second: Any) -> Any:
    """Return the first angles for the chosen tokens, and the second angles for the others."""
    if isinstance(first, tuple):
        return tuple(_chosen(chosen_N, *parts) for parts in zip(first, second, strict=True))
    return torch.where(chosen_N.view(1, -1, *[1] * (first.dim() - 2)), first, second)
