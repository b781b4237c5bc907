"""What config sections are made of: the frozen, strict base class, `key` to declare one setting, and
the few types that plain annotations cannot express."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic.config import JsonDict
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Section(BaseModel):
    """A part of the config: immutable, no unknown keys, no conversions between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def key(
    default: Any = ..., meaning: str = "", *, read_by: str, inherits: str | None = None, **limits: Any
) -> Any:
    """Declares one setting of a section.

    Args:
        default: the value when nobody sets one; left out, the key is required or inherited.
        meaning: what it does, with its unit.
        read_by: the modules of `tandem` that act on it.
        inherits: the key whose value stands in when nobody sets this one: ".name" in the same section,
            else a dotted path from the root. `default` then only serves a section built on its own.
        limits: pydantic's constraints, such as ge=1.
    """
    extra: JsonDict = {"read_by": read_by, "inherits": inherits}
    if inherits is not None and inherits.startswith("."):
        return Field(
            default_factory=_sibling(inherits[1:]), description=meaning, json_schema_extra=extra, **limits
        )
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


def _sibling(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values[name]


@dataclass(frozen=True)
class OneOf:
    """Text out of a list of names.

    Attributes:
        choices: the names.
        aliases: further spellings, turned into a name.
        absent: names that exist elsewhere, each with what to do here.
        own_code: whether "file.py:function" and "package.module:function" are right too.
    """

    choices: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    own_code: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.name, handler(source))

    def name(self, given: str | None) -> str | None:
        """The name meant by `given`; none by None, where the key allows it."""
        if given is None:
            return None
        name = self.aliases.get(given, given)
        if name in self.choices or (self.own_code and ":" in name):
            return name
        remedy = self.absent.get(given) or nearest_remedy(given, [*self.choices, *self.aliases])
        raise PydanticCustomError("unknown_name", "unknown value", {"remedy": remedy})

    def __str__(self) -> str:
        names = "one of " + ", ".join([*self.choices, *self.aliases])
        return names + (", or file.py:function" if self.own_code else "")


def nearest_remedy(given: str, names: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """A sentence with the name most like `given`, if any is at least `cutoff` (0 to 1) alike."""
    close = difflib.get_close_matches(given, list(names), n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else None


def _as_tuple(value: Any) -> Any:
    """YAML has lists only, and one text or integer may stand for a list of one; null is the empty list."""
    if value is None:
        return ()
    if isinstance(value, (str, int)):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


AsTuple = BeforeValidator(_as_tuple)

LocalPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A file or folder on this machine; `~` is expanded."""

Paths = Annotated[tuple[LocalPath, ...], AsTuple]
"""Files: one, or a list."""

Names = Annotated[tuple[str, ...], AsTuple]
"""Texts: one, or a list."""
