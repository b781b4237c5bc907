"""Config sections are made of these: the frozen, strict base class, `key` to declare one setting with what it
needs, and the few types that plain annotations cannot express."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tandem.errors import ConfigError

_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""A name and its meaning, in the `Attributes:` of a docstring."""

Resumed = Literal["refused", "told", "silent"]
"""What another value means where a run goes on: refused unless it is allowed, as something else would be
learnt; told; or not worth a word, as it says which run goes on."""


class WrongValueRead(Exception):
    """A rule has read a key whose value is a stand-in for a wrong one, and knows nothing from there on."""


@dataclass
class Place:
    """Where a section lies in the config that rules look at.

    Attributes:
        at: what stands before its keys: a dotted path and a dot, or nothing at the root.
        changed: the keys of the whole config that differ from what they would be had nobody set them.
        root: the whole config.
    """

    at: str
    changed: frozenset[str]
    root: Any = None


class Section(BaseModel):
    """A part of the config: immutable, no unknown keys, no conversions between types. Its docstring says
    under `Attributes:` what each key means, with its unit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    all_resumed: ClassVar[Resumed | None] = None
    """What another value of its keys means at a resume, unless they say it themselves; None: as outside."""
    _from_environment: dict[str, tuple[Any, Any]] = PrivateAttr(default_factory=dict)
    _place: Place | None = PrivateAttr(default=None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:  # which only what `view_of` makes can lack
                raise WrongValueRead(name)
            return super().__getattr__(name)

    @classmethod
    def __pydantic_init_subclass__(cls, **further: Any) -> None:
        super().__pydantic_init_subclass__(**further)
        entries = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
        for name, meaning in _ENTRY.findall(entries):
            cls.model_fields[name].description = " ".join(meaning.split())

    @property
    def from_environment(self) -> dict[str, tuple[Any, Any]]:
        """Of a whole config: the keys whose values came from the environment, each with the text that is
        written instead, and the value; see `tandem.config.written`."""
        return self._from_environment


@dataclass(frozen=True)
class When:
    """When a key counts, or all keys of a section.

    Attributes:
        applies: says whether it counts; it is given the section that holds the key, from which `path`, `root`
            and `changed` of `tandem.config.view` reach further.
        words: the same in words: "counts only <words>"; {name} becomes the dotted path of a key beside it.
        notice: whether a value that does not count is worth a sentence alone, as it concerns speed, memory or
            a part that does not run; else it is an error.
        neutral: values that ask for nothing, so that they may stand where the key does not count.
        switch: the key beside it that turns it on, if there is one: where it was given as false, its
            default, a sentence is enough.
    """

    applies: Callable[[Any], bool]
    words: str
    notice: bool = False
    neutral: tuple[Any, ...] = ()
    switch: str | None = None


Finding = ConfigError | str
"""What a rule yields: an error, or a notice as a plain sentence."""

Need = Callable[[Any, str], Iterator[Finding]]
"""A rule of one key: it is given the section that holds the key, and the name of the key. An error that names
no field is that key's; one that does not say what was given, its value."""


@dataclass(frozen=True)
class Declared:
    """What a key or section says of itself beside its type.

    Attributes:
        inherits: the key whose value stands in when nobody sets this one.
        when: all of these must hold for it to count.
        needs: rules that are asked where it counts.
        below: further conditions of a section's own keys, by name.
        resumed: what another value means at a resume; None: what the section says.
    """

    inherits: str | None = None
    when: tuple[When, ...] = ()
    needs: tuple[Need, ...] = ()
    below: Mapping[str, When] = field(default_factory=dict)
    resumed: Resumed | None = None


NOT_TRAINED = When(lambda own: False, "for a model that is trained")
"""Of keys below a model that only computes."""


def beside(name: str, *values: Any, notice: bool = False, neutral: tuple[Any, ...] = ()) -> When:
    """A key that counts where the key `name` beside it has one of these values."""
    words = (
        f"with {{{name}}}={' or '.join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)}"
    )
    switch = name if values == (True,) else None
    return When(lambda own: attrgetter(name)(own) in values, words, notice, neutral, switch)


def key(
    default: Any = ...,
    *,
    inherits: str | None = None,
    when: When | Sequence[When] = (),
    needs: Need | Sequence[Need] = (),
    resumed: Resumed | None = None,
    **limits: Any,
) -> Any:
    """Declare a setting that has more to say of itself than its type and default.

    Args:
        default: the value when nobody sets one; left out, the key is required or inherited.
        inherits: the key whose value stands in when nobody sets this one: ".name" in the same section,
            else a dotted path from the root. `default` then only serves a section built on its own.
        when: when it counts.
        needs: what it needs of other keys, of files or of the device, where it counts. An inherited value is
            asked for it at its source, unless that does not count.
        resumed: what another value means at a resume; None: what the section says.
        limits: pydantic's constraints, such as ge=1.
    """
    extra = _extra(Declared(inherits, _several(when), _several(needs), resumed=resumed))
    if inherits is not None and inherits.startswith("."):
        return Field(default_factory=_sibling(inherits[1:]), json_schema_extra=extra, **limits)
    return Field(default, json_schema_extra=extra, **limits)


def section(
    default: Any = ...,
    *,
    when: When | Sequence[When] = (),
    below: Mapping[str, When] | None = None,
) -> Any:
    """Declares a section within a section, where there is more to say than its type.

    Args:
        when: when the keys below it count.
        below: when single keys of it count, by name, as far as this depends on what is beside the section.
    """
    return Field(default, json_schema_extra=_extra(Declared(None, _several(when), below=below or {})))


def declared(info: FieldInfo) -> Declared:
    """What `key` or `section` was told."""
    extra = info.json_schema_extra
    found: Any = extra.get("declared") if isinstance(extra, dict) else None
    return found if isinstance(found, Declared) else Declared()


def _extra(what: Declared) -> JsonDict:
    return cast(JsonDict, {"declared": what})


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


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
