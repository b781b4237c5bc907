"""The pages of the config: every key of every command, from the types that declare it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from docs.verl_keys import table
from tandem.config.explain import COMMANDS, readers
from tandem.config.schema import Key, keys, shown

_BY_COMMAND = {"tandem sft": "sft", "tandem rm": "rm", "tandem generate": "generate", "tandem eval": "eval"}
_TRAIN = "tandem train"


def pages() -> dict[str, str]:
    """The pages by path below config/, in Markdown."""
    made = {
        f"{_slug(group)}.md": _page(f"`{group}` of {_TRAIN}", _TRAIN, members)
        for group, members in _groups().items()
    }
    for command, name in _BY_COMMAND.items():
        made[f"{name}.md"] = _page(f"Keys of {command}", command, keys(COMMANDS[command]).values())
    return {"index.md": _index(), **made}


def place(name: str) -> str:
    """Where a key of `tandem train` is described, below config/."""
    return f"{_slug(_group(name))}.md#{name}"


def _group(name: str) -> str:
    """The first section of a key; of the policy's models also the second."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "actor_rollout_ref" else 1])


def _groups() -> Mapping[str, list[Key]]:
    found: dict[str, list[Key]] = {}
    for key in keys(COMMANDS[_TRAIN]).values():
        found.setdefault(_group(key.name), []).append(key)
    return found


def _slug(group: str) -> str:
    return f"train-{group.replace('.', '-').replace('_', '-')}"


def _index() -> str:
    rows = [
        (
            f"[`{group}`]({_slug(group)}.md)",
            str(len(members)),
            ", ".join(_leaf(key) for key in members[:4]) + " …",
        )
        for group, members in _groups().items()
    ]
    others = [
        (f"[{command}]({name}.md)", str(len(keys(COMMANDS[command]))), "")
        for command, name in _BY_COMMAND.items()
    ]
    return (
        "\n\n".join(
            [
                "# Every key",
                f"The {len(keys(COMMANDS[_TRAIN]))} keys of `tandem train`, and those of the other commands: "
                "name, type, default, meaning, when it counts, and which module reads it. A key stands on a "
                "command line as `key=value`, with values in YAML; in a file as nested YAML; in Python in "
                '`config={"key": value}`. `tandem config explain KEY` says the same in a terminal, and an '
                "unknown key is an error that names the nearest known one.",
                table(("section", "keys", "such as"), rows),
                "## The other commands",
                table(("command", "keys", ""), others),
            ]
        )
        + "\n"
    )


def _leaf(key: Key) -> str:
    return f"`{key.name.rsplit('.', 1)[-1]}`"


def _page(title: str, command: str, members: Iterable[Key]) -> str:
    read_by = readers(command)
    return "\n\n".join([f"# {title}", *(_key(key, read_by[key.name]) for key in members)]) + "\n"


def _key(key: Key, read_by: list[str]) -> str:
    facts = [f"- type: {key.expected}", f"- default: {_default(key)}"]
    facts += [f"- used only {condition.words}" for condition in dict.fromkeys(key.conditions)]
    modules = ", ".join(f"`{module}`" for module in read_by) or "only the config itself"
    facts.append(f"- read by: {modules}")
    meaning = key.info.description or ""
    lines = [_plain(meaning[:1].upper() + meaning[1:]).rstrip(".") + ".", "\n".join(map(_plain, facts))]
    return "\n\n".join([f"## `{key.name}` {{ #{key.name} }}", *lines])


def _plain(text: str) -> str:
    """Text in which Markdown sees no emphasis, tag or link."""
    return "`".join(
        part
        if place % 2
        else part.replace("*", "\\*").replace("<", "&lt;").replace("[", "\\[").replace("_", "\\_")
        for place, part in enumerate(text.split("`"))
    )


def _default(key: Key) -> str:
    if key.inherits is not None:
        return f"the value of `{key.inherits}`"
    return "none (required)" if key.required else f"`{shown(key.default)}`"
