"""Read the user's YAML file and `key=value` overrides into nested dicts and lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from tandem.config.flow import read_flow
from tandem.config.hydra import UNREADABLE, compose, merged, take_options
from tandem.config.own_code import in_run_folder, require_own
from tandem.config.schema import nested
from tandem.config.written import hide_secrets
from tandem.errors import ConfigError
from tandem.texts import TooLargeError, check_yaml

Overrides = Sequence[str | Mapping[str, Any]]
"""Texts `key=value`, whose values are in YAML; or mappings from key (dotted or nested) to value."""


def split_arguments(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split a command's positional arguments, `[CONFIG.yaml] key=value …`, into the path and the overrides.

    Hydra's `--config-path` and `--config-name` can also name the file, or one of verl's configs.

    Raises:
        ConfigError: there is a second path or an unknown option, or the named file does not exist.
    """
    named, words = take_options(arguments)
    for text in words:
        if text.startswith("-"):
            raise ConfigError("unknown option", got=text, remedy="write settings as key=value")
    words = [*named, *words]
    paths = [text for text in words if not _is_override(text)]
    if len(paths) > 1:
        raise ConfigError(
            "this is neither an override nor the first config file",
            got=paths[1],
            expected="[CONFIG.yaml] key=value …",
            remedy="write overrides as key=value, without spaces around the equals sign",
        )
    return (paths[0] if paths else None), [text for text in words if _is_override(text)]


def _is_override(text: str) -> bool:
    return "=" in text or (text.startswith("~") and "/" not in text)


def read_sources(
    path: str | None, overrides: Overrides
) -> tuple[dict[str, Any], list[ConfigError], list[str], dict[str, Any]]:
    """Return four results: the given values, errors, notices, and the given values before interpolation.

    The values are nested dicts. In the first result, only interpolations of keys that were not given are
    unresolved.

    Args:
        path: a YAML file, if any. A file in Hydra's format is composed with the files of its `defaults:`. A
            file in a run folder may only load code if a run of this user wrote the file.
        overrides: texts `key=value`, whose values are in YAML, or lists and mappings as Hydra writes them; or
            dicts from key to value. Later overrides replace earlier overrides and the file's values. `~key`
            removes a key.
    """
    tree: Any = {}
    errors: list[ConfigError] = []
    read = _Overrides(errors)
    groups: set[str] = set()
    if path is not None:
        try:
            composed = compose(path, _choices(overrides))
            if in_run_folder(Path(path)):
                require_own(Path(path), composed.tree)
            groups = composed.groups
            read.hydra_keys += ["the section hydra of the file"] if composed.has_hydra_section else []
            for text in composed.overrides:
                tree = read.merge(tree, text)
            tree = merged(tree, composed.tree)
        except ConfigError as error:
            errors.append(error)
    for override in overrides:
        if isinstance(override, Mapping):
            for name, value in override.items():
                tree = merged(tree, nested({name: value}))
        elif override.partition("=")[0].lstrip("+") not in groups:
            tree = read.merge(tree, override)
    tree = {str(name): value for name, value in tree.items()}
    filled = _with_references(tree)
    hide_secrets(filled)
    return filled, errors, read.notices(), tree


def _choices(overrides: Overrides) -> dict[str, str]:
    pairs = (text.lstrip("+").partition("=") for text in overrides if isinstance(text, str))
    return {name: value for name, _, value in pairs if "@" in name or "." not in name}


def to_yaml(tree: Mapping[str, Any]) -> str:
    """Return nested dicts and lists as YAML that `read_sources` parses to equal values."""
    return str(yaml.dump(tree, Dumper=_Dumper, allow_unicode=True, sort_keys=False))


# OmegaConf takes 70 ms to write a whole config, libyaml takes 7 ms.
class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """PyYAML's dumper, with quotes around texts that OmegaConf would read as a number, such as 1e5."""

    def text(self, value: str) -> Any:
        try:
            float(value.replace("_", ""))
        except ValueError:
            return self.represent_str(value)
        return self.represent_scalar("tag:yaml.org,2002:str", value, style="'")


_Dumper.add_representer(str, _Dumper.text)


@dataclass
class _Overrides:
    """Reads overrides one by one, and collects notices."""

    errors: list[ConfigError]
    hydra_keys: list[str] = field(default_factory=list)
    prefixed: dict[str, list[str]] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)

    def merge(self, tree: Any, text: str) -> Any:
        """Return the nested values with an override added; unchanged if the override is invalid."""
        try:
            if text.startswith("~"):
                return self._without(tree, text[1:].partition("=")[0])
            name, _, value = text.partition("=")
            plain = name.lstrip("+")
            if plain.startswith(("hydra.", "hydra/")):
                self.hydra_keys.append(plain)
                return tree
            if not plain or "=" not in text:
                raise ConfigError("this is not an override", got=text, expected="key=value")
            new = merged(tree, _read_override(plain, value))
        except ConfigError as error:
            self.errors.append(error)
            return tree
        if plain != name:
            self.prefixed.setdefault(name[: -len(plain)], []).append(plain)
        if self.seen.get(plain, value) != value:
            self.repeated.append(plain)
        self.seen[plain] = value
        return new

    def notices(self) -> list[str]:
        lines = [
            f"{prefix}{names[0]}: the prefix {prefix} is not needed; the key is read as {names[0]}."
            if len(names) == 1
            else f"the prefix {prefix} is not needed; {len(names)} keys are read without it."
            for prefix, names in self.prefixed.items()
        ]
        if self.hydra_keys:
            lines.append(
                f"ignored, because Tandem does not run Hydra: {', '.join(self.hydra_keys)}. A run writes to "
                "trainer.default_local_dir."
            )
        return lines + [
            f"{name} is given more than once on the command line; the last value is used."
            for name in self.repeated
        ]

    def _without(self, tree: Any, name: str) -> Any:
        """Return the nested values without a key."""
        if not name:
            raise ConfigError("this is not an override", got="~", expected="~key")
        first, _, below = name.partition(".")
        if not isinstance(tree, dict) or first not in tree:
            return tree
        if below:
            return tree | {first: self._without(tree[first], below)}
        return {other: value for other, value in tree.items() if other != first}


def _read_override(name: str, value: str) -> Any:
    try:
        check_yaml(value)
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"{name}={value}"]), resolve=False)
    except (ValueError, *UNREADABLE) as error:
        if not isinstance(error, TooLargeError) and (tree := _read_flow(name, value)) is not None:
            return tree
        raise ConfigError(
            f"the value cannot be read as YAML: {str(error).splitlines()[0]}",
            field=name,
            got=value if len(value) < 200 else f"{value[:200]}…",
            remedy=f"put two pairs of quotes around a text with special characters: '{name}=\"…\"'",
        ) from error
    if ":" in value and "None" in repr(tree):  # YAML reads {a:1} as a key `a:1` without a value
        return _read_flow(name, value) or tree
    return tree


def _read_flow(name: str, value: str) -> Any:
    """Return the value of a list or mapping in Hydra's syntax; None for any other value."""
    try:
        tree = read_flow(value)
    except ValueError:
        return None
    for part in reversed(name.split(".")):
        tree = {part: tree}
    return tree


def _with_references(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill in the interpolations that only refer to given keys or to the environment."""
    if "${" not in repr(tree):
        return tree
    try:
        whole = OmegaConf.create(tree)
    except UNREADABLE:
        return tree

    def visit(value: Any, node: Any, name: Any) -> Any:
        if isinstance(value, dict):
            return {
                inner: visit(below, node[name] if name is not None else node, inner)
                for inner, below in value.items()
            }
        if isinstance(value, str) and "${" in value and "oc.select" not in value:
            try:
                found = node[name]
                return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
            except UNREADABLE:
                return value  # refers to a key that was not given, or is refused later
        return value

    filled = visit(tree, whole, None)
    assert isinstance(filled, dict)
    return filled
