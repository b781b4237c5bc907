"""Find on a small batch whether an algorithm looks at tokens, sequences or the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tandem.algorithms.registry import AdvantageSpec, Spec

_LENGTHS = (5, 4, 7, 6)
_PROMPT = 2
_COMPONENTS = 2


def level(spec: Spec, options: Mapping[str, Any]) -> str:
    """Return `token`, `sequence` or `batch`.

    For an advantage estimator this says whether all tokens of a sequence get the same advantage. For other
    algorithms it says how far a change of one token's log-prob reaches into the results of other tokens.

    Args:
        spec: the registered algorithm.
        options: the options to call it with.
    """
    return _of_estimator(spec, options) if isinstance(spec, AdvantageSpec) else _reach(spec, options)


def _of_estimator(spec: AdvantageSpec, options: Mapping[str, Any]) -> str:
    columns = _columns(spec)
    advantages = spec(columns, **options).advantages
    mask = columns["response_mask"]
    parts = zip(advantages.split(_LENGTHS), mask.split(_LENGTHS), strict=True)
    same = all(bool((part[kept] - part[kept][0]).abs().max() < 1e-9) for part, kept in parts)
    return "sequence" if same else "token"


def _reach(spec: Spec, options: Mapping[str, Any]) -> str:
    columns = _columns(spec)
    name = "log_probs" if "log_probs" in columns else "old_log_probs"
    moved = columns[name].clone()
    moved[_LENGTHS[0] - 1] += 1e-5
    change = _per_token(spec, options, columns | {name: moved}) - _per_token(spec, options, columns)
    first, *others = (part.abs() > 1e-12 for part in change.split(_LENGTHS))
    if any(bool(other.any()) for other in others):
        return "batch"
    return "sequence" if int(first.sum()) > 1 else "token"


def _per_token(spec: Spec, options: Mapping[str, Any], columns: dict[str, Tensor]) -> Tensor:
    call: Any = spec
    result = call(columns, **options)
    per_token: Tensor = result[0] if isinstance(result, tuple) else result
    return per_token


def _columns(spec: Spec) -> dict[str, Tensor]:
    """Return columns of two prompts with two samples each.

    Floats are random in float64, rewards are between 0 and 1, and the policies are nearly equal.
    """
    draw = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *_LENGTHS]).cumsum(0)
    tokens, sequences = int(offsets[-1]), len(_LENGTHS)
    shapes = {"(N)": (tokens,), "(B)": (sequences,), "(B, K)": (sequences, _COMPONENTS)}
    made: dict[str, Tensor] = {"offsets": offsets, "group": torch.arange(sequences) // 2}
    made["response_mask"] = torch.arange(tokens) - offsets[:-1].repeat_interleave(offsets.diff()) >= _PROMPT
    for name, meaning in spec.known_columns.items():
        if name not in made:
            shape = shapes[meaning[: meaning.index(")") + 1]]
            values = torch.rand(shape, generator=draw, dtype=torch.float64)
            if name.endswith("log_probs"):
                values = -1e-5 * values
            made[name] = values > 0.5 if "bool" in meaning else values
    return made
