"""What the user wrote: a YAML file and `key=value` overrides, as one tree of plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tandem.errors import ConfigError

UNREADABLE = (OmegaConfBaseException, YAMLError)


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """A command's positional arguments, `[CONFIG.yaml] key=value …`, as path and overrides.

    Raises:
        ConfigError: a second path, or an option.
    """
    for text in arguments:
        if text.startswith("-"):
            raise ConfigError("unknown option", got=text, remedy="settings are written key=value")
    paths = [text for text in arguments if "=" not in text]
    if len(paths) > 1:
        raise ConfigError(
            "not an override and not the first config file",
            got=paths[1],
            expected="[CONFIG.yaml] key=value …",
            remedy="write overrides as key=value, without spaces around the equals sign",
        )
    return (paths[0] if paths else None), [text for text in arguments if "=" in text]


def read_sources(
    path: str | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], list[ConfigError], list[str]]:
    """The tree of what was given (interpolations still unresolved), errors, and notices.

    Args:
        path: a YAML file, if any.
        overrides: `key=value` each, the value in YAML; later ones win, over the file too.
    """
    tree: Any = {}
    errors: list[ConfigError] = []
    notices: list[str] = []
    seen: set[str] = set()
    if path is not None:
        try:
            tree = _read_file(path)
        except ConfigError as error:
            errors.append(error)
    for text in overrides:
        try:
            name = _name(text, notices)
            tree = _merged(tree, _read_override(text.lstrip("+")))
        except ConfigError as error:
            errors.append(error)
            continue
        if name in seen:
            notices.append(f"{name} is given more than once on the command line; the last one counts.")
        seen.add(name)
    return {str(name): value for name, value in tree.items()}, errors, notices


def to_yaml(tree: Mapping[str, Any]) -> str:
    """A tree of plain values as YAML, which `read_sources` reads as the same tree."""
    return str(yaml.dump(tree, Dumper=_Dumper, allow_unicode=True, sort_keys=False))


# OmegaConf writes a whole config in 70 ms, libyaml in 7.
class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """PyYAML's, with quotes around what OmegaConf would read as a number, such as 1e5."""

    def text(self, value: str) -> Any:
        try:
            float(value.replace("_", ""))
        except ValueError:
            return self.represent_str(value)
        return self.represent_scalar("tag:yaml.org,2002:str", value, style="'")


_Dumper.add_representer(str, _Dumper.text)


def _merged(old: Any, new: Any) -> Any:
    """Mappings are merged, and anything else is replaced. (OmegaConf's own takes a millisecond for each
    override, of a whole tree.)"""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {name: _merged(old.get(name), value) for name, value in new.items()}


def _read_file(path: str) -> Any:
    if not Path(path).is_file():
        raise ConfigError(
            "no such config file", got=path, remedy="give an existing YAML file, or only key=value overrides"
        )
    try:
        tree = OmegaConf.load(path)
    except (UnicodeDecodeError, OSError, *UNREADABLE) as error:
        raise ConfigError("cannot be read as YAML", field=path, got=str(error)) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(
            "not a mapping", field=path, expected="sections such as data: and trainer: at the top level"
        )
    return OmegaConf.to_container(tree, resolve=False)


def _name(text: str, notices: list[str]) -> str:
    """The key of an override; Hydra's prefixes for adding are accepted, with a notice."""
    name, equals, _ = text.partition("=")
    plain = name.lstrip("+")
    if not equals or not plain or plain.startswith("~"):
        raise ConfigError(
            "not an override",
            got=text,
            expected="key=value",
            remedy="to return to a key's default leave the key out" if plain.startswith("~") else None,
        )
    if plain != name:
        notices.append(f"{name}: the prefix {name[: -len(plain)]} is not needed here; read as {plain}.")
    return plain


def _read_override(text: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=False)
    except UNREADABLE as error:
        name, _, value = text.partition("=")
        raise ConfigError(
            f"the value cannot be read as YAML: {str(error).splitlines()[0]}",
            field=name,
            got=value,
            remedy=f"quote a text with special characters twice: '{name}=\"…\"'",
        ) from error
