"""Building blocks of config sections.

`Section` is the frozen, strict base class. `key` declares one setting, the conditions under which the setting
is used, and the rules for its value. The module also has types for paths, names and lists.
"""

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
"""Matches one name and its description below `Attributes:` in a docstring."""

Resumed = Literal["refused", "reported", "silent"]
"""The reaction to a different value of the key when a run is resumed.

"refused": an error unless the user allows the change, because the key affects training. "reported": a message
names the change. "silent": no reaction, because the key only selects the run to resume.
"""


class InvalidValueRead(Exception):
    """Raised when a rule reads a key whose invalid value was replaced by a default.

    From then on, the rule's findings would be meaningless.
    """


@dataclass
class Place:
    """The position of a section in the config that rules check.

    Attributes:
        at: the prefix of the section's keys: a dotted path that ends with a dot, or "" at the root.
        changed: the keys of the whole config whose values differ from the default or inherited value.
        root: the whole config.
    """

    at: str
    changed: frozenset[str]
    root: Any = None


class Section(BaseModel):
    """The base class of config sections: immutable, no unknown keys, no conversions between types.

    The docstring of a section describes each key and its unit under `Attributes:`. `tandem config explain`
    and the reference pages print these descriptions.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    all_resumed: ClassVar[Resumed | None] = None
    """The `resumed` value of keys that do not set `resumed`; None: the value of the outer section."""
    _written_as: dict[str, tuple[Any, Any]] = PrivateAttr(default_factory=dict)
    _place: Place | None = PrivateAttr(default=None)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:  # only a copy made by `view_of` can lack a field
                raise InvalidValueRead(name)
            return super().__getattr__(name)

    @classmethod
    def __pydantic_init_subclass__(cls, **further: Any) -> None:
        super().__pydantic_init_subclass__(**further)
        entries = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
        for name, meaning in _ENTRY.findall(entries):
            cls.model_fields[name].description = " ".join(meaning.split())

    @property
    def written_as(self) -> dict[str, tuple[Any, Any]]:
        """Return the keys whose values are not written to files as they are (of a whole config only).

        They came from the environment, or are folders of changed models. The result is a dict from key to
        (text that is written to files instead of the value, value); see `tandem.config.written` and
        `tandem.config.changed_models`.
        """
        return self._written_as


@dataclass(frozen=True)
class When:
    """A condition under which a key, or every key of a section, is used.

    Attributes:
        applies: returns whether the key is used. Its argument is the section that has the key; `path`, `root`
            and `changed` of `tandem.config.view` give access to the rest of the config.
        words: a description of the condition, which completes "used only <words>". {name} is replaced by the
            dotted path of a key in the same section.
        notice: whether an unused value gives a notice instead of an error. Use True if the key only affects
            speed, memory or a component that does not run.
        neutral: values that have no effect, and are therefore allowed even if the key is not used.
        switch: the key in the same section that turns this key on, if there is one. If the user explicitly
            set the switch to false, which is its default, an unused value gives only a notice.
    """

    applies: Callable[[Any], bool]
    words: str
    notice: bool = False
    neutral: tuple[Any, ...] = ()
    switch: str | None = None


Finding = ConfigError | str
"""The result of a rule: an error, or a notice (a plain sentence)."""

Need = Callable[[Any, str], Iterator[Finding]]
"""A rule of one key. Its arguments are the section that has the key, and the key's name.

If an error of the rule has no `field`, the field becomes this key. If it has no `got`, `got` becomes the
value of the key.
"""


@dataclass(frozen=True)
class Declared:
    """The declarations of a key or section, in addition to its type.

    Attributes:
        inherits: the key whose value is used if this key is not set.
        when: conditions, all of which must hold for the key to be used.
        needs: rules that are checked if the key is used.
        below: a dict from key name to an additional condition, for single keys of a section.
        resumed: the reaction to a different value when a run is resumed; None: the section decides.
    """

    inherits: str | None = None
    when: tuple[When, ...] = ()
    needs: tuple[Need, ...] = ()
    below: Mapping[str, When] = field(default_factory=dict)
    resumed: Resumed | None = None


NOT_TRAINED = When(lambda own: False, "if the model is trained")
"""The condition for keys that only a trained model uses."""


def beside(name: str, *values: Any, notice: bool = False, neutral: tuple[Any, ...] = ()) -> When:
    """Return the condition that the key `name` in the same section has one of these values."""
    words = f"if {{{name}}}={' or '.join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)}"
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
    """Declare a setting that needs more than a type and a default.

    Args:
        default: the value if the user sets none. Without a default, the key is required or inherited.
        inherits: the key whose value is used if this key is not set: ".name" for a key in the same section,
            otherwise a dotted path from the root. `default` is then only used by a section that is created on
            its own.
        when: the conditions under which the key is used.
        needs: rules about other keys, files or the device, which are checked if the key is used. An inherited
            value is checked at its source key, unless the source key is not used.
        resumed: the reaction to a different value when a run is resumed; None: the section decides.
        **limits: pydantic's constraints, such as ge=1.
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
    """Declare a section within a section that needs more than a type.

    Args:
        default: the value if the user sets none of its keys.
        when: the conditions under which all keys of the section are used.
        below: a dict from key name to condition, for keys of the section whose conditions depend on keys next
            to the section.
    """
    return Field(default, json_schema_extra=_extra(Declared(None, _several(when), below=below or {})))


def declared(info: FieldInfo) -> Declared:
    """Return the declarations from the call of `key` or `section`."""
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
    """A text that must be one of a list of names.

    Attributes:
        choices: the names.
        aliases: other spellings, mapped to a name.
        absent: a dict from a name in other programs to advice on what to use instead.
        own_code: whether "file.py:function" and "package.module:function" are valid too.
    """

    choices: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    own_code: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.name, handler(source))

    def name(self, given: str | None) -> str | None:
        """Return the valid name for `given`, which may be an alias; None if `given` is None."""
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
    """Return a sentence that suggests the name most similar to `given`.

    Args:
        given: the text that the user wrote.
        names: the valid names.
        cutoff: the minimum similarity, 0 to 1. If no name reaches this similarity, the result is None.
    """
    close = difflib.get_close_matches(given, list(names), n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else None


def _as_tuple(value: Any) -> Any:
    """Convert a YAML value to a tuple.

    YAML only has lists. A single text or integer becomes a tuple with one item; null becomes ().
    """
    if value is None:
        return ()
    if isinstance(value, (str, int)):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


AsTuple = BeforeValidator(_as_tuple)

LocalPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A file or folder on this machine. `~` is expanded."""

Paths = Annotated[tuple[LocalPath, ...], AsTuple]
"""One file, or a list of files."""

Names = Annotated[tuple[str, ...], AsTuple]
"""One text, or a list of texts."""
