"""A config as files and messages may hold it: every key with its value, but for values from the environment,
which stay references to it, and for secrets, which are left out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from tandem.config.schema import Key, nested
from tandem.config.section import Section
from tandem.errors import ConfigError
from tandem.hidden import hide

C = TypeVar("C", bound=Section)
LEFT_OUT = "???"
"""Stands for a value that is not written. To OmegaConf it is one that must still be given."""
UNREADABLE = (OmegaConfBaseException, ValueError, TypeError, RecursionError)
"""What reading an interpolation raises."""
_SECRET = re.compile(
    r"(?i)(?:.*[_-])?(?:api_?key|(?:access|secret|private)_?key|secret|passw(?:or)?d|credentials?"
    r"|(?:api|auth|access|bearer|hf)_?token)"
)
"""Names under which a value is a secret."""
_LOGIN = re.compile(r"\w+://[^/\s:@]*:([^/\s@]+)@")
"""An address with a password in it."""
_REFERENCE = re.compile(r"\$\{(?:[\w.]+:)?['\"]?([^{}:,'\"]*)[^{}]*\}")
_READ: list[str] = []
"""The variables that interpolations have read, in their order."""


def _environment(name: str, *default: Any) -> Any:
    _READ.append(name)
    if name in os.environ:
        hide(os.environ[name], f"${{oc.env:{name}}}")
    return oc.env(name, *default)


OmegaConf.register_resolver("oc.env", _environment, replace=True)


def to_dict(config: Section) -> dict[str, Any]:
    """The whole config as plain dicts, lists, numbers and texts, as it may be written: references to the
    environment unresolved, secrets left out."""
    tree: dict[str, Any] = config.model_dump(mode="json")
    for name, (reference, value) in config.from_environment.items():
        *above, leaf = name.split(".")
        at = tree
        for part in above:
            at = at[part]
        if at[leaf] == value:  # else a later step of the program has set the key
            at[leaf] = reference
    written: dict[str, Any] = without_secrets(tree)
    return written


def hide_secrets(tree: Any) -> None:
    """Hide all secrets in a tree of what was given."""
    for key, text in _texts(tree):
        if _is_secret(key, text):
            login = _LOGIN.search(text)
            hide(login[1] if login else text, LEFT_OUT)


def with_references(config: C, given: Mapping[str, Any], raw: Mapping[str, Any], known: Iterable[Key]) -> C:
    """The config, told which of its values came from the environment.

    Args:
        config: the loaded config.
        given: the values that it was made of, by dotted path; interpolations that need defaults are
            unresolved.
        raw: what was written where each of them was given, all interpolations unresolved.
        known: all keys.
    """
    texts = {key.name: given.get(key.name, key.fallback) for key in known}
    texts |= {name: value for name, value in raw.items() if "${" in repr(value)}
    tree = OmegaConf.create(nested(texts))
    plain = config.model_dump(mode="json")
    found: dict[str, tuple[Any, Any]] = {}
    for name, text in texts.items():
        if "${" not in repr(text):
            continue
        before = len(_READ)
        value = _value(tree, name)
        if len(_READ) == before and value is not _UNRESOLVED:
            continue
        filled = name in raw and "${" not in repr(given[name])
        same = value == given[name] if filled else value is not _UNRESOLVED
        found[name] = (text if same else LEFT_OUT, at_key(plain, name))
    config.from_environment.update(found)
    return config


def remade(config: C, tree: Mapping[str, Any]) -> C:
    """Another config of the same kind from a tree of values; what came from the environment is still known.

    Raises:
        pydantic.ValidationError: a wrong value.
    """
    new = type(config).model_validate(tree)
    new.from_environment.update(config.from_environment)
    return new


def tracked_name(value: str, written: str) -> str:
    """A name as trackers are given it, and take it: where it is not written as it is, each reference is cut
    down to the name of the variable or the key.

    Args:
        value: the name.
        written: what stands for it in a written config.
    """
    while value != written and (shorter := _REFERENCE.sub(r"\1", written)) != written:
        written = shorter
    return written


def resolved(tree: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted key of a config that was written; None where there is no such key. Only what this
    key refers to is looked at.

    Raises:
        ConfigError: it refers to a variable that is not set, or to a key that is not there.
    """
    try:
        return plain(OmegaConf.create(dict(tree)), name)
    except UNREADABLE as error:
        raise ConfigError(
            f"cannot be resolved: {str(error).splitlines()[0]}",
            field=name,
            got=at_key(tree, name),
            remedy="set the environment variable that it names, as for the run itself",
        ) from error


def plain(tree: DictConfig, name: str) -> Any:
    """The value of a dotted key, interpolations filled in."""
    found = OmegaConf.select(tree, name)
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


def at_key(tree: Any, name: str, absent: Any = None) -> Any:
    """Return what a nested mapping holds under a dotted key; `absent` where there is no such key."""
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return absent
        tree = tree[part]
    return tree


def refers(value: Any) -> bool:
    """Whether a written value is a reference or was left out."""
    return any("${" in text or text == LEFT_OUT for _, text in _texts(value))


def places_left_out(value: Any, name: str) -> Iterator[str]:
    """The dotted paths below a key at which a value was left out."""
    if value == LEFT_OUT:
        yield name
    inner = (
        value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, list) else ())
    )
    for key, below in inner:
        yield from places_left_out(below, f"{name}.{key}")


_UNRESOLVED = object()


def _value(tree: DictConfig, name: str) -> Any:
    try:
        return plain(tree, name)
    except UNREADABLE:
        return _UNRESOLVED


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a tree, each with the name of the key that has it."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, name)


def _is_secret(name: str, text: str) -> bool:
    named = _SECRET.fullmatch(name) is not None or _LOGIN.search(text) is not None
    return named and text != "" and "${" not in text


def without_secrets(value: Any, name: str = "") -> Any:
    """A tree of plain values in which `LEFT_OUT` stands for each secret.

    Args:
        name: of the key that has the value.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(inner, name) for inner in value]
    return LEFT_OUT if isinstance(value, str) and _is_secret(name, value) else value
