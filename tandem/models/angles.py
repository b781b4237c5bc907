"""Rotary angles that depend on a sequence's length, for sequences that are packed into one row.

With rope types "longrope" and "dynamic", transformers chooses the angles of a whole batch by its longest
sequence. Here each sequence gets the angles that it has alone. In training, a sequence is long or short as a
whole. In generation, a sequence becomes long when it grows beyond the limit (see `AngleTables`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class AngleTables:
    """The angles of each position, for the models of rope type "longrope" that generate.

    A sequence's level is the number of limits that are below its length. All its keys must have the angles of
    its level.

    Args:
        model: a model of transformers.
        longest: the maximum number of tokens of a sequence.
        like: a tensor with the dtype and device of the model's hidden states.

    Attributes:
        limits: the lengths, in tokens, above which a sequence has other angles, in ascending order.
        modules: the rotary embeddings that are replaced by tables.
        tables: all tables.
    """

    def __init__(self, model: nn.Module, longest: int, like: Tensor) -> None:
        kinds = {module: _kinds(module) for module in model.modules()}
        self.modules = {module for module, own in kinds.items() if "longrope" in own.values()}
        limits = {
            _limit(module, layer_type)
            for module in self.modules
            for layer_type, kind in kinds[module].items()
            if kind == "longrope"
        }
        self.limits = tuple(sorted(limit for limit in limits if limit < longest))
        self.tables: list[Tensor] = []
        self._angles: dict[tuple[nn.Module, str | None], Any] = {}
        positions, x = torch.arange(longest, device=like.device)[None], like.reshape(-1)[:1].view(1, 1, 1)
        for module in self.modules:
            for layer_type in kinds[module]:
                levels = [_of_length(module, x, positions, layer_type, n) for n in (*self.limits, longest)]
                self._angles[module, layer_type] = _each(self._table, *levels)

    def _table(self, *levels: Tensor) -> Tensor:
        self.tables.append(torch.cat(levels))
        return self.tables[-1]

    @contextmanager
    def used(self, levels_N: Tensor) -> Iterator[None]:
        """Inside the context, let the model take its angles from the tables.

        Args:
            levels_N: int64, the level of the sequence of each token in the model's single row.
        """
        before = {module: vars(module).get("forward") for module in self.modules}
        for module in before:
            module.forward = partial(self._found, module, levels_N)
        try:
            yield
        finally:
            for module, forward in before.items():
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward

    def _found(
        self,
        module: nn.Module,
        levels_N: Tensor,
        x: Tensor,
        position_ids: Tensor,
        layer_type: str | None = None,
    ) -> Any:
        return _each(lambda table: table[levels_N, position_ids], self._angles[module, layer_type])


def _kinds(module: Any) -> dict[str | None, str]:
    """Return the rope types of a rotary embedding by type of layer; None: all layers."""
    kinds = getattr(module, "rope_type", None) or {}
    return kinds if isinstance(kinds, dict) else {None: kinds}


def _limit(module: Any, layer_type: str | None) -> int:
    """Return the length, in tokens, above which the angles of a sequence change."""
    if _kinds(module)[layer_type] == "dynamic":
        return int(module.original_max_seq_len)
    own = module.config.rope_parameters if layer_type is None else module.config.rope_parameters[layer_type]
    return int(own["original_max_position_embeddings"])


def _by_length(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """Return the angles of the packed tokens, computed once for each length that makes a difference."""
    kind, packing = _kinds(module)[layer_type], attended()
    if kind not in BY_LENGTH or not isinstance(packing, Packing):
        return _plain(module, x, position_ids, layer_type)
    limit = _limit(module, layer_type)
    longest = (
        limit + 1 if kind == "longrope" else max(packing.whole_lengths)
    )  # all longer ones have equal angles
    found: Any = None
    for length in sorted({min(max(length, limit), longest) for length in packing.whole_lengths}):
        made = _of_length(module, x, position_ids, layer_type, length)
        chosen_N = packing.whole_lengths_here() >= length
        found = made if found is None else _each(partial(_chosen, chosen_N), made, found)
    return found


def _of_length(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None, length: int) -> Any:
    """Return the angles that positions (1, N) have in a sequence of `length` tokens."""
    kind = _kinds(module)[layer_type]
    if kind == "dynamic":
        _reset(module, layer_type)
    long = kind == "longrope" and length > _limit(module, layer_type)
    positions = position_ids if long else position_ids.clamp(max=length - 1)
    # transformers takes the largest position for the length, so one more position is appended.
    positions = torch.cat([positions, positions.new_full((len(positions), 1), length - 1)], 1)
    return _each(lambda part: part[:, :-1], _plain(module, x, positions, layer_type))


def _plain(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None) -> Any:
    """Return the angles that transformers computes."""
    kinds = {} if layer_type is None else {"layer_type": layer_type}
    return type(module).forward(module, x, position_ids, **kinds)


def _reset(module: Any, layer_type: str | None) -> None:
    """Set the angles to those of short sequences. Otherwise a longer sequence's angles would stay."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    original = getattr(module, f"{prefix}original_inv_freq")
    held = getattr(module, f"{prefix}inv_freq")
    setattr(module, f"{prefix}inv_freq", original.to(held.device))
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _each(function: Callable[..., Tensor], *angles: Any) -> Any:
    """Apply a function to angles, which are one tensor or a tuple of tensors (cosines and sines)."""
    if isinstance(angles[0], tuple):
        return tuple(function(*parts) for parts in zip(*angles, strict=True))
    return function(*angles)


def _chosen(chosen_N: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return the first angles for the chosen tokens, and the second angles for the others."""
    return torch.where(chosen_N.view(1, -1, *[1] * (first.dim() - 2)), first, second)
