"""The texts of `tandem config explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from tandem.config.generate import EvalConfig, GenerateConfig
from tandem.config.root import TrainConfig
from tandem.config.schema import Key, keys, sections, shown, unknown_key
from tandem.config.section import Section
from tandem.config.supervised import RMConfig, SFTConfig
from tandem.peers.table import rule_of
from tandem.texts import parse_json

READERS = Path(__file__).with_name("readers.json")
"""A JSON file with the modules that read each key: {command: {key: modules}}.

`python -m docs.readers` writes this file from the code.
"""

COMMANDS: Mapping[str, type[Section]] = {
    "tandem train": TrainConfig,
    "tandem sft": SFTConfig,
    "tandem rm": RMConfig,
    "tandem generate": GenerateConfig,
    "tandem eval": EvalConfig,
}


def explain(name: str) -> str:
    """Return the type, default and description of a key, and the modules that read it; or a section's keys.

    Raises:
        ConfigError: there is no such key; the error suggests the most similar one.
    """
    parts = [f"{name} ({command})\n{text}" for command in COMMANDS if (text := _explain(command, name))]
    if name not in keys(TrainConfig) and (rule := rule_of(name)) is not None:
        parts.append(f"{name} (tandem train)\n  {rule.verdict}: {rule}")
    if not parts:
        raise unknown_key(name, [known for root in COMMANDS.values() for known in keys(root)])
    return "\n\n".join(parts)


def overview(command: str) -> str:
    """Return all keys of a command with their defaults and meanings."""
    return _listed(keys(COMMANDS[command]).values())


@cache
def readers(command: str) -> Mapping[str, list[str]]:
    """Return the modules that read each key of a command."""
    found: dict[str, dict[str, list[str]]] = parse_json(READERS.read_bytes())
    return found[command]


def _explain(command: str, name: str) -> str | None:
    root = COMMANDS[command]
    if name in sections(root):
        return _listed(key for key in keys(root).values() if key.name.startswith(f"{name}."))
    if name not in keys(root):
        return None
    key = keys(root)[name]
    return (
        f"  type:    {key.expected}\n"
        f"  default: {_default(key)}\n"
        f"  meaning: {key.info.description}\n"
        f"  read by: {', '.join(readers(command)[name]) or 'only the config itself'}"
    )


def _listed(group: Iterable[Key]) -> str:
    return "\n".join(f"{key.name}: {_default(key)}\n    {key.info.description}" for key in group)


def _default(key: Key) -> str:
    if key.inherits is not None:
        return f"the value of {key.inherits}"
    return "none (required)" if key.required else shown(key.default)
