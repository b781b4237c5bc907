"""The keys of a config as one flat table, derived from the types of its sections."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tandem.config.other_names import meant_elsewhere
from tandem.config.section import Need, OneOf, Resumed, Section, When, declared, nearest_remedy
from tandem.errors import ConfigError

REQUIRED = PydanticUndefined
"""The default of a key that has no default."""


@dataclass(frozen=True)
class Condition:
    """A `When` condition, with the path of the section that declares the condition.

    Attributes:
        at: the prefix of the keys in that section: a dotted path that ends with a dot, or "" at the root.
        when: the condition.
    """

    at: str
    when: When

    @property
    def words(self) -> str:
        return re.sub(r"\{([\w.]+)\}", lambda name: self.at + name.group(1), self.when.words)


@dataclass(frozen=True)
class Key:
    """One key of a config.

    Attributes:
        name: the dotted path from the root.
        conditions: the conditions under which the key is used, outermost first.
        needs: rules that are checked if the key is used.
        default: the value if the user sets none; REQUIRED if there is no default. Unused if `inherits` is
            set.
        inherits: the dotted path of the key whose value is used if this key is not set, if any.
        info: pydantic's declaration.
        resumed: the reaction to a different value when a run is resumed; see `Resumed`.
    """

    name: str
    conditions: tuple[Condition, ...]
    needs: tuple[Need, ...]
    default: Any
    inherits: str | None
    info: FieldInfo
    resumed: Resumed

    @property
    def required(self) -> bool:
        return self.default is REQUIRED and self.inherits is None

    @property
    def fallback(self) -> Any:
        """Return the value that OmegaConf uses if the user sets none; "" for a required key."""
        if self.inherits is not None:
            return f"${{{self.inherits}}}"
        return "" if self.default is REQUIRED else self.default

    @property
    def expected(self) -> str:
        """Return a description of the type and its limits."""
        return _words(self.info.annotation, self.info.metadata)


@cache
def keys(root: type[Section]) -> Mapping[str, Key]:
    """Return a dict from dotted path to key, in the order of declaration."""
    return {key.name: key for key in _walk(root, None, "", (), {}, "refused")}


@cache
def sections(root: type[Section]) -> frozenset[str]:
    """Return the dotted paths of all sections that have keys."""
    return frozenset(
        name.rsplit(".", depth)[0] for name in keys(root) for depth in range(1, name.count(".") + 1)
    )


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a dict from dotted path to value to nested dicts."""
    out: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        at = out
        for parent in parents:
            at = at.setdefault(parent, {})
        at[leaf] = value
    return out


def value_at(config: Section, name: str) -> Any:
    """Return the value of a key in a loaded config."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def unknown_key(name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that does not exist, with the most similar existing key.

    Keys with the same last name are tried first, because the user may have named the wrong section. Then
    follow keys that have this name in another program.
    """
    names = list(known)
    leaf = name.rsplit(".", 1)[-1]
    same_leaf = [other for other in names if other.rsplit(".", 1)[-1] == leaf]
    remedy = (
        nearest_remedy(name, same_leaf, cutoff=0.0)
        or meant_elsewhere(name, names)
        or nearest_remedy(name, names)
    )
    return ConfigError(
        "unknown key", field=name, remedy=remedy or "run `tandem config show` to list all keys"
    )


def shown(value: Any) -> str:
    """Return a value in YAML, on one line."""
    return json.dumps(value, default=str, ensure_ascii=False)


def is_no_number(given: Any) -> bool:
    """Return whether the value is NaN or infinite, as a number or as a text.

    YAML itself parses only .nan and .inf as such numbers.
    """
    try:
        return isinstance(given, float | str) and not math.isfinite(float(given))
    except ValueError:
        return False


def _walk(
    section: type[Section],
    preset: Section | None,
    at: str,
    outer: tuple[Condition, ...],
    below: Mapping[str, Condition],
    resumed: Resumed,
) -> Iterator[Key]:
    """Yield the keys of `section`, which is at path `at`.

    Args:
        section: the section's type.
        preset: the parent's default for the section.
        at: the prefix of the section's keys.
        outer: conditions that apply to every key of the section.
        below: conditions that apply to single keys of the section.
        resumed: the reaction to a different value when a run is resumed, unless the section declares another
            reaction.
    """
    resumed = section.all_resumed or resumed
    for name, info in section.model_fields.items():
        path, declaration = f"{at}{name}", declared(info)
        is_preset = preset is not None and name in preset.model_fields_set
        default = getattr(preset, name) if is_preset else info.default
        conditions = (
            *outer,
            *((below[name],) if name in below else ()),
            *(Condition(at, when) for when in declaration.when),
        )
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            inner = {child: Condition(at, when) for child, when in declaration.below.items()}
            preset_of_it = None if default is REQUIRED else default
            yield from _walk(info.annotation, preset_of_it, f"{path}.", conditions, inner, resumed)
            continue
        inherits = declaration.inherits
        if inherits is not None and inherits.startswith("."):
            inherits = at + inherits[1:]
        inherits = None if is_preset else inherits
        yield Key(
            path, conditions, declaration.needs, default, inherits, info, declaration.resumed or resumed
        )


_SIMPLE = {int: "integer", float: "number", bool: "true or false", str: "text", dict: "mapping"}


def _words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return a description of a type and its limits."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(parts[0], [*parts[1:], *metadata])
    if origin in (UnionType, Union):
        (inner,) = (part for part in parts if part is not NoneType)
        return f"{_words(inner, metadata)}, or null"
    if origin is Literal:
        return "one of " + ", ".join(parts)
    if origin is tuple:
        many = "or a list of them" if parts[-1] is Ellipsis else f"as a list of {len(parts)}"
        return f"{_words(parts[0])}, {many}"
    if origin is dict and parts[1] is not Any:
        return f"mapping, each value: {_words(parts[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping of " + ", ".join(annotation.model_fields)
    named = next((str(item) for item in metadata if isinstance(item, OneOf)), None)
    limits = " and ".join(words for item in metadata if (words := _limit(item)))
    return f"{named or _SIMPLE[origin or annotation]} {limits}".rstrip()


def _limit(item: Any) -> str | None:
    match item:
        case annotated_types.Ge(ge=bound):
            return f">= {bound}"
        case annotated_types.Gt(gt=bound):
            return f"> {bound}"
        case annotated_types.Le(le=bound):
            return f"<= {bound}"
        case annotated_types.Lt(lt=bound):
            return f"< {bound}"
    return None
