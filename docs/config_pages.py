"""Generate the pages of config keys: all keys of every command, from their declared types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from docs.verl_keys import table
from tandem.config.explain import COMMANDS, readers
from tandem.config.schema import Key, keys, shown

_BY_COMMAND = {"tandem sft": "sft", "tandem rm": "rm", "tandem generate": "generate", "tandem eval": "eval"}
_TRAIN = "tandem train"


def pages() -> dict[str, str]:
    """Return the Markdown of every page by its path below config/."""
    made = {
        f"{_slug(group)}.md": _page(f"`{group}` of {_TRAIN}", _TRAIN, members)
        for group, members in _groups().items()
    }
    for command, name in _BY_COMMAND.items():
        made[f"{name}.md"] = _page(f"Keys of {command}", command, keys(COMMANDS[command]).values())
    return {"index.md": _index(), **made}


def place(name: str) -> str:
    """Return the link target of a key of `tandem train`, below config/."""
    return f"{_slug(_group(name))}.md#{name}"


def _group(name: str) -> str:
    """Return the first section of a key, or the first two for keys of `actor_rollout_ref`."""
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
                f"The {len(keys(COMMANDS[_TRAIN]))} keys of `tandem train`, and the keys of the other "
                "commands. Each key has its type, default and meaning, when it is used, and which modules "
                "read it. On a command line, write `key=value` with a YAML value. In a file, write nested "
                'YAML. In Python, use `config={"key": value}`. `tandem config explain KEY` prints the same '
                "facts in a terminal. An unknown key is an error, and the message suggests the most similar "
                "key.",
                table(("section", "keys", "for example"), rows),
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
    modules = ", ".join(f"`{module}`" for module in read_by) or "only the config code itself"
    facts.append(f"- read by: {modules}")
    meaning = key.info.description or ""
    lines = [_plain(meaning[:1].upper() + meaning[1:]).rstrip(".") + ".", "\n".join(map(_plain, facts))]
    return "\n\n".join([f"## `{key.name}` {{ #{key.name} }}", *lines])


def _plain(text: str) -> str:
    """Escape what Markdown would read as emphasis, a tag or a link, outside of code."""
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
