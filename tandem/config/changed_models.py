"""Models that a run changes, with the keys `override_config` and `resize_embeddings`.

A changed model has a folder in the user's cache: a config.json with the changes, and links to all other
files of the model's folder. Everything that reads the model reads this folder. Its name depends on the model
and the changes, so each command and each process finds the same folder. `tandem.models.resized` adds the
weights of a larger or smaller embedding. When a folder is made, those that no process used for a month are
removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.config.section import Section
from tandem.errors import ConfigError
from tandem.lifetime import hold, remove_unused
from tandem.texts import parse_json

C = TypeVar("C", bound=Section)

CONFIG, _ORIGIN = "config.json", ".tandem.json"
ROPE = ("rope_scaling", "rope_parameters")
"""The names of the rotary parameters in a config.json: before and since version 5 of transformers."""
_KEPT = ("rope_theta", "partial_rotary_factor")
"""The rotary parameters that also have a meaning for another rope type."""
_KEYS: dict[str, str] = {}
"""A dict from the folder of a changed model to the prefix of the keys that changed it in the last config."""


def stored_config(folder: str | Path) -> dict[str, Any]:
    """Return a model's config.json; {} if the file is unreadable, which other checks report."""
    return _json(Path(folder).expanduser() / CONFIG)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the folder of a changed model comes from.

    Attributes:
        source: the folder of the unchanged model.
        override: the changed fields of config.json.
        rows: the rows of the embedding; None if they are unchanged.
    """

    source: str
    override: dict[str, Any]
    rows: int | None


def origin_of(folder: str | Path) -> Origin | None:
    """Return where the folder of a changed model comes from; None for any other folder.

    Only folders in the cache count, because a folder from elsewhere may contain a file of this name.
    """
    place = Path(folder).expanduser().absolute()
    stored = _json(place / _ORIGIN) if place.parent == _cache().absolute() else {}
    return Origin(**stored) if stored else None


def given_name(folder: str) -> str:
    """Return the folder of a model for messages: of a changed model, the folder that the user gave."""
    origin = origin_of(folder)
    return folder if origin is None else f"{origin.source} with changes"


def changing_key(folder: str | Path, name: str) -> str:
    """Return the whole key that changes a model, for messages; `name` is its last part."""
    return _KEYS.get(str(folder), "model.") + name


def with_changed_models(config: C) -> tuple[C, list[str]]:
    """Replace the path of each changed model by the folder with the changes.

    A written config still has the path that the user gave.

    Args:
        config: the whole config.

    Returns:
        The config, and a sentence for each changed model.

    Raises:
        ConfigError: a change does not fit the model's config.json.
    """
    written: dict[str, tuple[str, str]] = {}
    sentences: dict[str | None, str] = {}

    def visited(section: Any, at: str) -> Any:
        inner = {name: value for name, value in section if isinstance(value, Section)}
        new: dict[str, Any] = {name: visited(value, f"{at}{name}.") for name, value in inner.items()}
        override = getattr(section, "override_config", {})
        rows = getattr(section, "resize_embeddings", None)
        if (override or rows) and section.path:
            folder = changed_folder(section.path, override, rows, at=at)
            said = f"{at}path is {folder}: {section.path} with the changes."
            if folder is None:
                said = f"{at}override_config and resize_embeddings: no effect without a config.json."
            else:
                written[f"{at}path"], new["path"] = (section.path, folder), folder
                _KEYS[folder] = _KEYS[folder] if folder in sentences else at
            sentences.setdefault(folder, said)
        changed = any(value is not inner.get(name) for name, value in new.items())
        return section.model_copy(update=new) if changed else section

    found: C = visited(config, "")
    found.written_as.update(written)
    return found, list(sentences.values())


def changed_folder(
    path: str, override: Mapping[str, Any], rows: int | None, at: str = "model."
) -> str | None:
    """Make the folder of a changed model in the user's cache, and return it.

    Args:
        path: the folder of the unchanged model.
        override: the changed fields of config.json.
        rows: the rows of the embedding; None if they are unchanged.
        at: the prefix of the section's keys, for messages.

    Returns:
        The folder; None if the model's folder has no config.json.

    Raises:
        ConfigError: a change does not fit the model's config.json.
    """
    source, stored = Path(path).expanduser().absolute(), stored_config(path)
    if not stored:
        return None
    changed = changed_config(stored, override, f"{at}override_config.")
    if rows is not None:
        text = changed.get("text_config")
        (text if isinstance(text, dict) else changed)["vocab_size"] = rows
    origin = Origin(str(source), dict(override), rows)
    texts = [json.dumps(part, indent=2, ensure_ascii=False) + "\n" for part in (changed, asdict(origin))]
    digest = hashlib.blake2b("".join(texts).encode(), digest_size=6).hexdigest()
    folder = _cache() / f"{source.name}-{digest}"
    while not hold(folder):
        _make(folder, texts)
    link_files(folder)
    return str(folder)


def _make(folder: Path, texts: Sequence[str]) -> None:
    """Make the folder with config.json and origin, and remove folders that were not used for a month."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}"))
    for name, text in zip((CONFIG, _ORIGIN), texts, strict=True):
        (made / name).write_text(text, encoding="utf-8")
    try:
        made.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    remove_unused(folder.parent)


def link_files(folder: Path) -> None:
    """Link the files of the unchanged model that the folder of the changed model does not have yet."""
    origin = origin_of(folder)
    assert origin is not None, "the folder of a changed model"
    for file in Path(origin.source).iterdir():
        place = folder / file.name
        if file.name.startswith(".") or os.path.lexists(place):
            continue
        try:
            place.symlink_to(file)
        except FileExistsError:  # another process was faster
            continue


def changed_config(stored: Mapping[str, Any], override: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return the content of a config.json with changed fields. Nested fields are merged.

    Rotary parameters are changed where the file has them, under their old or new name. If the rope type
    changes, the parameters of the old type are dropped.

    Args:
        stored: the content of config.json, or a nested part of it.
        override: the changed fields.
        at: the prefix of the fields, for messages.

    Raises:
        ConfigError: the model has rotary parameters per type of layer, but the changed ones are not.
    """
    result = dict(stored)
    given = [name for name in ROPE if name in override]
    place = next((name for name in reversed(ROPE) if name in stored), given[-1] if given else ROPE[0])
    rope: dict[str, Any] = {}
    for name in given:
        rope |= override[name] or {"rope_type": "default"}
    for name, value in override.items():
        if name in _KEPT and place == ROPE[1]:
            rope[name] = value
        elif isinstance(value, Mapping) and name not in ROPE:
            result[name] = changed_config(stored.get(name) or {}, value, f"{at}{name}.")
        elif name not in ROPE:
            result[name] = value
    if rope:
        result[place] = _changed_rope(stored.get(place) or {}, rope, at + (given[-1] if given else place))
    return result


def _changed_rope(stored: Mapping[str, Any], rope: Mapping[str, Any], field: str) -> dict[str, Any]:
    by_layer = [name for name, value in stored.items() if isinstance(value, Mapping)]
    if by_layer and not set(rope) <= set(by_layer):
        raise ConfigError(
            "this model has rotary parameters per type of layer",
            field=field,
            got=", ".join(rope),
            expected=f"some of {', '.join(by_layer)}, each with its parameters",
            remedy=f"set {field}.{by_layer[0]}.rope_type=… and so on",
        )
    if by_layer:
        return {**stored, **{name: _changed_rope(stored[name], rope[name], field) for name in rope}}
    kind, before = rope_type(rope), rope_type(stored)
    kept = stored if kind in (None, before) else {name: stored[name] for name in _KEPT if name in stored}
    merged = {**kept, **rope, "rope_type": kind or before or "default"}
    merged.pop("type", None)
    if isinstance(merged.get("factor"), int):
        merged["factor"] = float(merged["factor"])  # transformers warns about integers
    return merged


def rope_type(rope: Mapping[str, Any]) -> str | None:
    """Return the rope type under its old or new name; None if the parameters name none."""
    found: str | None = rope.get("rope_type", rope.get("type"))
    return found


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens in a sequence that a model supports.

    For YaRN, it is factor · original_max_position_embeddings, as model cards mean it; for linear scaling,
    factor · max_position_embeddings.

    Args:
        config: the content of a config.json.

    Returns:
        The limit; None if there is no limit, or if the rotary angles depend on the length of the sequence.
    """
    text = config.get("text_config") or config
    most = text.get("max_position_embeddings")
    if not isinstance(most, int):
        return None
    limits = [_stretched(rope, most) for rope in _ropes(text)]
    return None if None in limits else max(most, *(limit or 0 for limit in limits))


def limit_name(config: Mapping[str, Any]) -> str:
    """Return the name of a model's `position_limit`, for messages."""
    unstretched = (config.get("text_config") or config).get("max_position_embeddings")
    name = "max_position_embeddings"
    return name if position_limit(config) == unstretched else f"factor · original_{name}"


def _stretched(rope: Mapping[str, Any], most: int) -> int | None:
    kind, factor = rope_type(rope), rope.get("factor") or 1
    if kind == "yarn":
        return int(factor * (rope.get("original_max_position_embeddings") or most))
    if kind == "linear":
        return int(factor * most)
    return None if kind == "dynamic" else most


def _ropes(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters: one mapping for all layers, or one per type of layer."""
    for name in ROPE:
        rope = text.get(name) or {}
        by_layer = [value for value in rope.values() if isinstance(value, Mapping)]
        yield from by_layer or [rope]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem" / "models"


def _json(file: Path) -> dict[str, Any]:
    try:
        stored = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}
