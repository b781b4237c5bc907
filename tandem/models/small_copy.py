"""Functions that create a small copy of a model's config, for testing the architecture.

The copy has the same types of layers, with fewer features. The copy's windows, chunks and limits of rotary
angles are so small that short sequences exceed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, TypeGuard

from transformers import PreTrainedConfig

from tandem.models.architectures import field_of

LONGEST = 40
"""The length of a sequence, in tokens, that exceeds every window, chunk and angle limit of a small copy."""
_VOCABULARY = 96
_WINDOW, _POSITIONS, _STRETCHED = 8, 64, 16
_WINDOWS = ("window", "chunk", "block_size", "floor_scale")  # substrings of config keys that set a limit
_NO_WINDOWS = ("layer", "pattern", "feed_forward")
_POSITION_LIMITS = ("position", "n_ctx", "max_seq", "seq_len")
_ALL_LAYERS = ("decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")
_PERIODS = ("period", "interval", "freq", "step", "pattern", "offset", "first_k", "every", "replace")
_SAME = ("theta", "base", "seed", "num_", "n_head", "_heads", "group", "version", "precision")
_HEAD, _HIDDEN, _EXPERTS, _DEEPEST = 8, 32, 16, 12
_FEED_FORWARD = 128
_SMALLEST_SIZE = 32
_FEED_FORWARDS = ("moe_intermediate", "ffn", "intermediate_size")


def small_copy(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a small config of the same architecture, which a CPU runs in well under a second.

    All sizes are divided by the same number, so that their ratios stay the same. At least one layer of each
    type is kept.
    """
    copy = deepcopy(config)
    text = copy.get_text_config()
    factor = _factor(text)
    for part in _parts(copy):
        own = _layer_fields(part)
        kept = _fewer_layers(part)
        stretched = bool(list(angle_limits(part)))
        ropes = _ropes(getattr(part, "rope_parameters", None))
        original = any(rope.get("original_max_position_embeddings") for rope in ropes)
        for name, value in list(vars(part).items()):
            whole = isinstance(value, PreTrainedConfig) or name in _ALL_LAYERS
            if not name.startswith("_") and not whole:
                smaller = _smaller(name, value, factor)
                if name == "intermediate_size" and "expand" in vars(part):
                    smaller = value // factor  # the width of the recurrent layers, not of an MLP
                if name == "max_position_embeddings" and stretched and not original:
                    smaller = min(value, _STRETCHED)
                if smaller != value:
                    setattr(part, name, smaller)
        if own:
            part.per_layer_config = {
                place: {name: _smaller(name, value, factor) for name, value in own[index].items()}
                for place, index in enumerate(kept)
                if index in own
            }
    copy._experts_implementation = "eager"  # other implementations do not support float64 on a CPU
    return copy


def window_limits(config: PreTrainedConfig) -> list[int]:
    """Return the sorted lengths, in tokens, above which a model may treat sequences differently.

    These are the lengths of windows and chunks, and the limits of rotary angles.
    """
    found = []
    for part in _parts(config):
        for name, value in vars(part).items():
            if _is_int(value) and value > 1 and not name.startswith("_") and _is_window(name, value):
                found.append(value)
        found += angle_limits(part)
    return sorted(found)


def angle_limits(config: PreTrainedConfig) -> Iterator[int]:
    """Yield the lengths above which rotary angles change.

    If the angles depend only on the position, nothing is yielded.
    """
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            named = rope.get("original_max_position_embeddings")
            limit = named or getattr(config, "max_position_embeddings", None)
            if _is_int(limit):
                yield limit


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary parameters: one dict for all layers, or one dict per type of layer."""
    if isinstance(parameters, dict):
        yield parameters
        for value in parameters.values():
            yield from _ropes(value)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield the config and all configs nested inside it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _layer_fields(config: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Return the fields with which single layers differ from the config, by the layer's index."""
    stored = config.to_dict().get("per_layer_config") or {}
    return {int(index): fields for index, fields in stored.items()}


def _factor(text: Any) -> int:
    """Return the number by which all sizes are divided.

    It is the largest power of two with which heads still have `_HEAD` features.
    """
    hidden = field_of(text, "hidden_size")
    heads = field_of(text, "num_attention_heads")
    if not _is_int(hidden):
        return 1
    head = field_of(text, "head_dim") or (hidden // heads if _is_int(heads) else hidden)
    factor = 1
    while head >= 2 * factor * _HEAD and hidden >= 2 * factor * _HIDDEN and hidden % (2 * factor) == 0:
        if head % (4 * factor):  # rotary angles need an even number of features
            break
        factor *= 2
    return factor


def _smaller(name: str, value: Any, factor: int) -> Any:
    """Return the value of the key `name` in the small copy."""
    if isinstance(value, list) and value and all(_is_int(each) and each >= _SMALLEST_SIZE for each in value):
        return [_smaller(name, each, factor) for each in value]
    if not _is_int(value):
        return _smaller_rope(value, factor) if name in ("rope_parameters", "rope_scaling") else value
    most = _most(name, value)
    if most is not None:
        return min(value, most)
    if "expert" in name and "size" not in name and "dim" not in name:
        return _halved(value, _EXPERTS)
    if value < _SMALLEST_SIZE or any(word in name for word in _SAME):
        return value
    smaller = max(1, value // factor)
    return _halved(smaller, _FEED_FORWARD) if any(word in name for word in _FEED_FORWARDS) else smaller


def _halved(value: int, most: int) -> int:
    """Return the value, halved until it is at most `most` or odd."""
    while value > most and value % 2 == 0:
        value //= 2
    return value


def _most(name: str, value: int) -> int | None:
    """Return the maximum value of a config key in the small copy; None if there is no maximum.

    The sizes of the vocabulary and of windows, token ids, and numbers of positions have a maximum.
    """
    if "token" in name and ("id" in name or "index" in name):
        return _VOCABULARY - 1
    if "vocab" in name:
        return _VOCABULARY
    if _is_window(name, value):
        return _WINDOW
    if any(word in name for word in _POSITION_LIMITS):
        return _STRETCHED if "original" in name else _POSITIONS
    return None


def _smaller_rope(parameters: Any, factor: int) -> Any:
    """Return rotary parameters with limits below `LONGEST`, and with lists that fit the smaller heads."""
    if not isinstance(parameters, dict):
        return parameters
    smaller: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            smaller[name] = _smaller_rope(value, factor)
        elif name.endswith("factor") and isinstance(value, list):
            smaller[name] = value[: max(1, len(value) // factor)]
        elif name.endswith("section") and isinstance(value, list):
            smaller[name] = [max(1, entry // factor) for entry in value]
        elif "position" in name and _is_int(value):
            smaller[name] = min(value, _STRETCHED)
        else:
            smaller[name] = value
    return smaller


def _fewer_layers(config: Any) -> list[int]:
    """Keep the first layers, up to the longest period of a pattern, and one layer of each other type.

    Returns:
        The indices of the layers that are kept.
    """
    name = next((name for name in _ALL_LAYERS if _is_int(vars(config).get(name))), None)
    if name is None or vars(config)[name] <= 2:
        return list(range(vars(config).get(name, 0)))
    depth = vars(config)[name]
    lists = {key: value for key, value in vars(config).items() if _is_per_layer(key, value, depth)}
    named = {key: value for key, value in vars(config).items() if _names_layers(key, value, depth)}
    periods = [
        value
        for key, value in vars(config).items()
        if _is_int(value) and any(word in key for word in _PERIODS) and 1 < value < depth
    ]
    first = min(depth, max([2, *(period + 1 for period in periods)]))
    shared = vars(config).get("num_kv_shared_layers") or 0

    def kind(index: int) -> tuple[object, ...]:
        told = (str(value[index]) for value in lists.values())
        return (index >= depth - shared, *told, *(index in value for value in named.values()))

    kept = list(range(min(first, _DEEPEST, depth - shared)))
    seen = set(map(kind, kept))
    for index in range(len(kept), depth):
        if kind(index) not in seen and len(kept) < _DEEPEST:
            seen.add(kind(index))
            kept.append(index)
    if shared:
        config.num_kv_shared_layers = sum(index >= depth - shared for index in kept)
    setattr(config, name, len(kept))
    for key, value in named.items():
        setattr(config, key, [place for place, index in enumerate(kept) if index in value])
    for key, value in lists.items():
        picked = [value[index] for index in kept]
        setattr(config, key, "".join(picked) if isinstance(value, str) else type(value)(picked))
    return kept


def _is_per_layer(name: str, value: Any, depth: int) -> bool:
    """Return whether a value has one entry per layer: a list, or a string with one letter per layer."""
    written = isinstance(value, (list, tuple)) or (isinstance(value, str) and "pattern" in name)
    return written and len(value) == depth and "token" not in name


def _names_layers(name: str, value: Any, depth: int) -> bool:
    """Return whether a value is a list of layer indices."""
    told = any(word in name for word in ("layer", "idx", "indices")) and isinstance(value, (list, tuple))
    return told and len(value) < depth and all(_is_int(each) and 0 <= each < depth for each in value)


def _is_window(name: str, value: int) -> bool:
    """Return whether a value limits the number of earlier tokens on which a token depends."""
    named = any(word in name for word in _WINDOWS) and not any(word in name for word in _NO_WINDOWS)
    return named or ("topk" in name and value >= _SMALLEST_SIZE)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
