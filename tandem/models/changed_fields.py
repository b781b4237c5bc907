"""Checks of the fields of a config.json that a run changes with `model.override_config`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.config.changed_models import ROPE, changing_key, origin_of, rope_type, stored_config
from tandem.config.section import nearest_remedy
from tandem.errors import ModelError

_ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
_ROPE_NAMES = (
    *(
        "type",
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
    ),
    *(
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "low_freq_factor",
    ),
    *("high_freq_factor", "short_factor", "long_factor", "mrope_section", "mrope_interleaved"),
)


def require_fields(folder: Path, config: PreTrainedConfig) -> None:
    """Check that a model's config has all fields that a run changes.

    Args:
        folder: the model's folder.
        config: the folder's config.

    Raises:
        ModelError: If the config has no such field, or transformers does not know the rope type.
    """
    origin = origin_of(folder)
    if origin is not None:
        at = changing_key(folder, "override_config")
        _require(origin.override, config, stored_config(origin.source), at)


def misfit(folder: Path, problem: str) -> ModelError | None:
    """Return the error that a model cannot be loaded with its changed fields; None if no field is changed."""
    origin = origin_of(folder)
    if origin is None or not origin.override:
        return None
    return ModelError(
        "the model cannot be loaded with the changed fields of its config.json",
        field=changing_key(folder, "override_config"),
        got=f"{origin.override}: {problem}",
        expected="valid values, which do not change the shapes of weights",
        remedy="correct or remove these fields",
    )


def _require(
    override: Mapping[str, Any], config: PreTrainedConfig, stored: Mapping[str, Any], at: str
) -> None:
    inner = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    names = _names_of(config) | stored.keys() | set(ROPE)
    names |= {f"{part}.{name}" for part in inner for name in _names_of(inner[part])}
    for name, value in override.items():
        if name not in names:
            raise _unknown(f"{at}.{name}", type(config).__name__, name, names)
        if name in ROPE:
            _require_rope(value or {}, f"{at}.{name}")
        elif name in inner:
            _require(value, inner[name], stored.get(name) or {}, f"{at}.{name}")


def _require_rope(rope: Mapping[str, Any], at: str) -> None:
    for name, value in rope.items():
        if isinstance(value, Mapping):  # the parameters of one type of layer
            _require_rope(value, f"{at}.{name}")
        elif name not in _ROPE_NAMES:
            raise _unknown(f"{at}.{name}", "the rotary parameters", name, _ROPE_NAMES)
    kind = rope_type(rope)
    if kind is not None and kind not in _ROPE_TYPES:
        raise ModelError(
            "transformers does not know this rope type",
            field=f"{at}.rope_type",
            got=kind,
            expected=", ".join(_ROPE_TYPES),
            remedy=nearest_remedy(kind, _ROPE_TYPES),
        )


def _names_of(config: PreTrainedConfig) -> set[str]:
    """Return the names of the fields that a config class declares, without those that only an object has."""
    kinds = [kind for kind in type(config).__mro__ if issubclass(kind, PreTrainedConfig)]
    declared = {name for kind in kinds for name in inspect.get_annotations(kind)}
    return declared | inspect.signature(type(config)).parameters.keys() | type(config).attribute_map.keys()


def _unknown(field: str, whose: str, name: str, names: Collection[str]) -> ModelError:
    return ModelError(
        "the model's config has no such field",
        field=field,
        got=name,
        expected=f"a field of {whose}",
        remedy=nearest_remedy(name, names) or "remove it",
    )
