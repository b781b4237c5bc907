"""Convert a config to a version without secrets, for files and messages.

The version has every value, with two exceptions. Values from environment variables stay references to the
variables, and secrets are left out.
"""

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
"""The text that is written in place of a secret. In OmegaConf, this text marks a missing value."""
UNREADABLE = (OmegaConfBaseException, ValueError, TypeError, RecursionError)
"""The exceptions that reading an interpolation can raise."""
_SECRET = re.compile(
    r"(?i)(?:.*[_-])?(?:api_?key|(?:access|secret|private)_?key|secret|passw(?:or)?d|credentials?"
    r"|(?:api|auth|access|bearer|hf)_?token)"
)
"""Matches the names of keys whose values are secrets."""
_LOGIN = re.compile(r"\w+://[^/\s:@]*:([^/\s@]+)@")
"""Matches an address that contains a password."""
_REFERENCE = re.compile(r"\$\{(?:[\w.]+:)?['\"]?([^{}:,'\"]*)[^{}]*\}")
_READ: list[str] = []
"""The environment variables that interpolations have read, in order."""


def _environment(name: str, *default: Any) -> Any:
    _READ.append(name)
    if name in os.environ:
        hide(os.environ[name], f"${{oc.env:{name}}}")
    return oc.env(name, *default)


OmegaConf.register_resolver("oc.env", _environment, replace=True)


def to_dict(config: Section) -> dict[str, Any]:
    """Return the whole config as plain dicts, lists, numbers and texts, ready to be written to a file.

    References to environment variables stay unresolved, and secrets are left out.
    """
    tree: dict[str, Any] = config.model_dump(mode="json")
    for name, (reference, value) in config.written_as.items():
        *above, leaf = name.split(".")
        at = tree
        for part in above:
            at = at[part]
        if at[leaf] == value:  # otherwise a later step of the program has set the key
            at[leaf] = reference
    written: dict[str, Any] = without_secrets(tree)
    return written


def hide_secrets(tree: Any) -> None:
    """Register all secrets in a tree of given values, so that messages and logs mask them."""
    for key, text in _texts(tree):
        if _is_secret(key, text):
            login = _LOGIN.search(text)
            hide(login[1] if login else text, LEFT_OUT)


def with_references(config: C, given: Mapping[str, Any], raw: Mapping[str, Any], known: Iterable[Key]) -> C:
    """Record in the config which values came from environment variables, and return the config.

    Args:
        config: the loaded config.
        given: a dict from dotted path to a value that the config was made from. Interpolations that need
            defaults are unresolved.
        raw: a dict from dotted path to the value that the user wrote, with all interpolations unresolved.
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
    config.written_as.update(found)
    return config


def remade(config: C, tree: Mapping[str, Any]) -> C:
    """Return another config of the same class, made from nested values.

    The new config keeps the references to environment variables.

    Raises:
        pydantic.ValidationError: a value is invalid.
    """
    new = type(config).model_validate(tree)
    new.written_as.update(config.written_as)
    return new


def tracked_name(value: str, written: str) -> str:
    """Return a name for experiment trackers, without the values of environment variables.

    If the written name differs from the value, each reference is shortened to the name of its variable or
    key.

    Args:
        value: the name.
        written: the text of the name in a written config.
    """
    while value != written and (shorter := _REFERENCE.sub(r"\1", written)) != written:
        written = shorter
    return written


def resolved(tree: Mapping[str, Any], name: str) -> Any:
    """Return the value of a dotted key of a written config; None if there is no such key.

    Only the references of this key are resolved.

    Raises:
        ConfigError: the key refers to an environment variable that is not set, or to a key that does not
            exist.
    """
    try:
        return plain(OmegaConf.create(dict(tree)), name)
    except UNREADABLE as error:
        raise ConfigError(
            f"cannot be resolved: {str(error).splitlines()[0]}",
            field=name,
            got=at_key(tree, name),
            remedy="set the environment variable that it names to the value that it had for the run",
        ) from error


def plain(tree: DictConfig, name: str) -> Any:
    """Return the value of a dotted key, with interpolations resolved."""
    found = OmegaConf.select(tree, name)
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


def at_key(tree: Any, name: str, absent: Any = None) -> Any:
    """Return the value of a dotted key in a nested mapping, or `absent` if there is no such key."""
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return absent
        tree = tree[part]
    return tree


def refers(value: Any) -> bool:
    """Return whether a written value contains a reference, or was left out."""
    return any("${" in text or text == LEFT_OUT for _, text in _texts(value))


def places_left_out(value: Any, name: str) -> Iterator[str]:
    """Yield the dotted paths below a key at which a value was left out."""
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
    """Yield (key name, text) for each text in a nested value."""
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
    """Return a copy of a nested value in which `LEFT_OUT` replaces each secret.

    Args:
        value: the value.
        name: the name of the key that has the value.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(inner, name) for inner in value]
    return LEFT_OUT if isinstance(value, str) and _is_secret(name, value) else value
