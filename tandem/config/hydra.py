"""Read Hydra's command-line options and config files without the package Hydra.

These are `--config-path`, `--config-name`, and YAML with a `defaults:` list of other files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tandem.errors import ConfigError
from tandem.texts import check_yaml

UNREADABLE = (OmegaConfBaseException, YAMLError)

VERLS_OWN: dict[str, tuple[str, ...]] = {
    "ppo_trainer": (),
    "ppo_megatron_trainer": ("model_engine=megatron",),
}
"""A dict from a main config file of verl to the overrides that replace the file, besides verl's defaults."""

VERLS_GROUPS = frozenset(
    {
        *("actor", "algorithm", "critic", "data", "distillation", "engine", "legacy_reward_impl", "model"),
        *("model_engine", "npu_profile", "optim", "profiler", "ref", "reward", "rollout", "transfer_queue"),
    }
)
"""The folders and files that verl's main config files load."""

VERLS_DEFAULTS: tuple[str, ...] = ("trainer.defaults=verl",)
"""The overrides that select verl's defaults for values that are not given."""

_WITH_VALUE = {
    **{"--config-path": "path", "-cp": "path", "--config-name": "name", "-cn": "name"},
    **{"--config-dir": "folder", "-cd": "folder"},
}
_REFUSED = {
    "--multirun": "use a shell loop to start several runs",
    "--cfg": "`tandem config show` prints the resolved config",
    "--info": "`tandem check` reports what is wrong with a config",
}
_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")
_ENTRY = re.compile(r"(?:(override|optional)\s+)?([^@\s]*)(?:@(\S+))?")


def take_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Remove Hydra's options from a command line.

    Returns:
        Two lists. The first has the config file that the options name; for a config file of verl, it has the
        overrides that replace the file; it may be empty. The second has the other words.

    Raises:
        ConfigError: an option has no value, an option is not supported, or the file does not exist.
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name in _REFUSED:
            raise ConfigError("this option of Hydra is not supported", got=word, remedy=_REFUSED[name])
        if name not in _WITH_VALUE:
            rest.append(word)
        elif equals or left:
            given[_WITH_VALUE[name]] = value if equals else left.pop(0)
        else:
            raise ConfigError("this option needs a value", got=word)
    return (_named(given) if given else []), rest


def _named(given: Mapping[str, str]) -> list[str]:
    name = given.get("name", "ppo_trainer").removesuffix(".yaml")
    folders = [Path(given[kind]) for kind in ("folder", "path") if kind in given] or [Path()]
    found = [folder / f"{name}.yaml" for folder in folders]
    for file in found:
        if file.is_file() and not _is_verls(file):
            return [str(file)]
    if name in VERLS_OWN:
        return [*VERLS_DEFAULTS, *VERLS_OWN[name]]
    raise ConfigError(
        "this config file does not exist",
        field="--config-name",
        got=name,
        expected=f"{' or '.join(map(str, found))}, or a config of verl: {', '.join(VERLS_OWN)}",
    )


def _is_verls(file: Path) -> bool:
    return "verl/trainer/config" in file.resolve().as_posix()


def merged(old: Any, new: Any) -> Any:
    """Merge two mappings recursively. For any other type, return `new`.

    OmegaConf's own merge takes a millisecond per override, because it handles the whole tree.
    """
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {name: merged(old.get(name), value) for name, value in new.items()}


def read_file(path: str) -> Any:
    """Return the values of a YAML file as nested dicts and lists, with interpolations unresolved.

    Raises:
        ConfigError: the file does not exist, or is not a mapping in YAML.
    """
    if not Path(path).is_file():
        raise ConfigError(
            "this config file does not exist",
            got=path,
            remedy="use an existing YAML file, or only key=value overrides",
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
        check_yaml(text)
        tree = OmegaConf.load(StringIO(text))
    except (ValueError, OSError, *UNREADABLE) as error:
        raise ConfigError("cannot be read as YAML", field=path, got=str(error)) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(
            "the file is not a mapping",
            field=path,
            expected="sections such as data: and trainer: at the top level",
        )
    return OmegaConf.to_container(tree, resolve=False)


@dataclass
class Composed:
    """A config file in Hydra's format, composed of the files that its `defaults:` list names.

    Attributes:
        tree: all values, with interpolations unresolved.
        overrides: the overrides that replace files of verl in the list.
        groups: the config groups in the list. The command line may choose a file of each group.
        has_hydra_section: whether a file had a section for Hydra itself.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    has_hydra_section: bool = False


def compose(path: str, choices: Mapping[str, str]) -> Composed:
    """Compose a config file, which may be in Hydra's format or plain YAML.

    Args:
        path: the file.
        choices: a dict from key to value, from the command line. If a key is the name of a group, the value
            selects the group's file.

    Raises:
        ConfigError: a file does not exist, is not a mapping in YAML, or a default cannot be found.
    """
    composed = Composed()
    tree = read_file(path)
    search = [Path(path).parent, *_searched(tree)]
    _Composer(composed, search, dict(choices)).add(Path(path), tree, group="", package="")
    return composed


def _searched(tree: Mapping[str, Any]) -> Iterator[Path]:
    own = tree.get("hydra")
    for place in (own.get("searchpath") or []) if isinstance(own, dict) else []:
        yield Path(str(place).removeprefix("file://"))


@dataclass
class _Composer:
    composed: Composed
    search: list[Path]
    choices: dict[str, str]
    stack: list[Path] = field(default_factory=list)

    def add(self, file: Path, tree: dict[str, Any], *, group: str, package: str) -> None:
        """Merge the files of a `defaults:` list and the file itself (at `_self_`) into the tree."""
        if file in self.stack:
            raise ConfigError("this file includes itself in its defaults", field=str(file))
        self.stack.append(file)
        entries = tree.pop("defaults", None) if isinstance(tree.get("defaults"), list) else None
        self.composed.has_hydra_section |= "hydra" in tree and group == ""
        if group == "":
            tree.pop("hydra", None)
        parsed = [part for entry in entries or [] for part in self._entries(file, entry)]
        for kind, name, value, at in parsed:
            if kind == "override":
                self.choices.setdefault(name.strip("/") + (f"@{at}" if at else ""), value)
        if not any(name == "_self_" for _, name, _, _ in parsed):
            parsed.append(("", "_self_", "", None))
        for kind, name, value, at in parsed:
            if name == "_self_":
                self._merge(tree, package)
            elif kind != "override":
                self._add_default(file, (kind, name, value, at), group=group, package=package)
            elif name.strip("/") == "model_engine" and value:
                self.composed.overrides.append(f"model_engine={value}")
        self.stack.pop()

    def _entries(self, file: Path, entry: Any) -> Iterator[tuple[str, str, str, str | None]]:
        """Parse an entry of a `defaults:` list and yield (kind, group, file, package).

        If the entry has no group, the second item is the file, and the third item is empty.
        """
        pairs = list(entry.items()) if isinstance(entry, dict) else [(entry, "")]
        for name, value in pairs:
            found = _ENTRY.fullmatch(str(name))
            if found is None or isinstance(value, dict):
                raise ConfigError(
                    "this is not a valid entry of a defaults list", field=str(file), got=str(entry)
                )
            for one in value if isinstance(value, list) else [value]:
                if one is not None:
                    yield found[1] or "", found[2], str(one), found[3]

    def _add_default(
        self, file: Path, entry: tuple[str, str, str, str | None], *, group: str, package: str
    ) -> None:
        kind, name, value, at = entry
        inner = name.strip("/") if name.startswith("/") or not group else f"{group}/{name}"
        place = inner
        if value:
            which = inner if at is None else f"{inner}@{at}"
            self.composed.groups.add(which)
            place = f"{inner}/{self._chosen(which, value)}"
        else:
            inner = inner.rpartition("/")[0]
        found = self._find(place)
        if found is None:
            if place.split("/")[0] in VERLS_GROUPS or place in VERLS_OWN:
                self._verls(place)
            elif kind != "optional":
                looked = ", ".join(f"{folder}/{place}.yaml" for folder in self.search)
                raise ConfigError(
                    "a default of this file does not exist", field=str(file), got=place, expected=looked
                )
            return
        header = _PACKAGE.search(found.read_text(encoding="utf-8"))
        inside = _joined(package, inner[len(group) :].strip("/").replace("/", ".") if value else "")
        if at is not None:
            inside = "" if at == "_global_" else package if at == "_here_" else _joined(package, at)
            inside = at.removeprefix("_global_.") if at.startswith("_global_.") else inside
        elif header is not None and header[1] not in ("_group_",):
            inside = "" if header[1] == "_global_" else header[1]
        self.add(found, read_file(str(found)), group=inner, package=inside)

    def _chosen(self, group: str, value: str) -> str:
        """Return the file that is chosen for a group, with `${other_group}` in the file's name replaced."""
        value = self.choices.get(group, value)
        self.choices.setdefault(group, value)
        return re.sub(r"\$\{(\w+)\}", lambda other: self.choices.get(other[1], other[0]), value)

    def _find(self, place: str) -> Path | None:
        for folder in self.search:
            file = folder / f"{place.removesuffix('.yaml')}.yaml"
            if file.is_file():
                return None if _is_verls(file) else file
        return None

    def _verls(self, place: str) -> None:
        stands_for = [*VERLS_DEFAULTS, *VERLS_OWN.get(place, ())]
        engine = place.removeprefix("model_engine/")
        if engine != place and engine != "dp":
            stands_for.append(f"model_engine={engine}")
        self.composed.overrides += [text for text in stands_for if text not in self.composed.overrides]

    def _merge(self, tree: dict[str, Any], package: str) -> None:
        for part in reversed(package.split(".") if package else []):
            tree = {part: tree}
        self.composed.tree = merged(self.composed.tree, tree)


def _joined(package: str, below: str) -> str:
    return ".".join(part for part in (package, below) if part)
