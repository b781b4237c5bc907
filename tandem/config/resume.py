"""The comparison of a resumed run's config with the config of the original run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.hydra import read_file
from tandem.config.schema import keys, shown
from tandem.config.section import Section
from tandem.config.tables import published_aggregation
from tandem.config.written import LEFT_OUT, at_key, refers, resolved, to_dict, without_secrets
from tandem.errors import ConfigError
from tandem.peers.table import former_names

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs from that of the original run.

    Attributes:
        key: the key's name.
        then: the value in the original run, in YAML.
        now: the value now, in YAML.
    """

    key: str
    then: str
    now: str


def check_same(checkpoint: Path, config: Section, *, allowed: bool, say: Callable[[str], None]) -> None:
    """Report the keys whose values differ from the config of the run that wrote a checkpoint.

    Args:
        checkpoint: the checkpoint's folder, inside the run folder.
        config: the config of the resumed run.
        allowed: whether keys that affect training may have changed.
        say: receives each message.

    Raises:
        ConfigError: a key that affects training has changed, which is not allowed; or the run's config is not
            valid YAML.
    """
    file = checkpoint.parent.parent / "config.yaml"
    if not file.is_file():
        return
    then = read_file(str(file))
    refused = {name for name, key in keys(type(config)).items() if key.resumed == "refused"}
    if unseen := [name for name in config.written_as if refers(at_key(then, name)) and name in refused]:
        say(
            f"The run folder has no values for these keys, so a change cannot be detected: "
            f"{', '.join(unseen)}. Their values came from the environment."
        )
    changed = changes({str(name): value for name, value in then.items()}, config)
    learnt = [change for change in changed if change.key in refused]
    free = [f"{each.key} ({each.then}, now {each.now})" for each in changed if each.key not in refused]
    if free:
        say(
            f"Changed since {checkpoint}: {', '.join(free)}. "
            "These settings affect where, how fast or how long the run goes, but not what it learns."
        )
    if learnt and not allowed:
        raise ConfigError(
            f"the run in this folder used different settings for learning\n{side_by_side(learnt)}",
            field="trainer.default_local_dir",
            got=file.parent,
            remedy="set these keys back to their old values; or use a different trainer.default_local_dir; "
            "or set trainer.resume_mode=disable to move this run away; or set "
            "trainer.resume_with_changes=true to continue from its checkpoint anyway",
        )
    if learnt:
        say(f"Changed since {checkpoint}. These settings affect what is learned:\n{side_by_side(learnt)}")


def changes(then: Mapping[str, Any], config: Section) -> list[Change]:
    """Return the keys whose values have changed.

    Args:
        then: the resolved config with which the original run started, perhaps with key names of an older
            version. A missing key did not exist yet, and counts as unchanged.
        config: the config of the resumed run.
    """
    now, values = to_dict(config), config.model_dump(mode="json")
    found: dict[str, tuple[Any, Any]] = {}
    known = keys(type(config))
    for name in known:
        old, new, value = (
            _named(tree, name, value)
            for tree, value in (
                (then, _old_value(then, name)),
                (now, at_key(now, name, _ABSENT)),
                (values, at_key(values, name, _ABSENT)),
            )
        )
        silent = old is _ABSENT or known[name].resumed == "silent"
        if not (silent or _same(old, new) or _same(_value(then, old), value)):
            found[name] = old, new
    return [
        Change(name, shown(without_secrets(old, name)), shown(new))
        for name, (old, new) in found.items()
        if found.get(known[name].inherits or "")
        != (old, new)  # otherwise the key that it inherits from is reported
    ]


def _same(old: Any, new: Any) -> bool:
    """Return whether two values are equal. A secret that was left out of the file counts as equal."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_same(value, new[name]) for name, value in old.items())
    return old == LEFT_OUT or bool(old == new)


def _value(tree: Mapping[str, Any], written: Any) -> Any:
    """Return a value of a written config, with its references resolved if possible."""
    if not refers(written):
        return written
    try:
        return resolved({**tree, "written": written}, "written")
    except ConfigError:
        return written


def side_by_side(changed: list[Change]) -> str:
    """Return a table with one line per changed key: the key, its old value and its new value."""
    rows = [("key", "then", "now"), *((change.key, change.then, change.now) for change in changed)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {key:<{first}}  {then:<{second}}  {now}" for key, then, now in rows)


def _old_value(tree: Mapping[str, Any], name: str) -> Any:
    value = at_key(tree, name, _ABSENT)
    for old in former_names(name) if value is _ABSENT else ():
        if value is _ABSENT:
            value = at_key(tree, old, _ABSENT)
    return value


def _named(tree: Mapping[str, Any], name: str, value: Any) -> Any:
    """Return the value of a key. For a loss aggregation of null, return the aggregation of the loss."""
    at, _, leaf = name.rpartition(".")
    if value is not None or leaf != "loss_agg_mode":
        return value
    loss = at_key(tree, f"{at}.policy_loss.loss_mode", _ABSENT)
    return published_aggregation(loss if isinstance(loss, str) else "")
