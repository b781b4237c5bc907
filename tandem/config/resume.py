"""What may differ between a run and its continuation."""

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
    """A key whose value is not that of the run that goes on.

    Attributes:
        key: its name.
        then, now: its values, as YAML spells them.
    """

    key: str
    then: str
    now: str


def check_same(checkpoint: Path, config: Section, *, allowed: bool, say: Callable[[str], None]) -> None:
    """Tell the user which keys have other values than in the run that a checkpoint is of.

    Args:
        checkpoint: its folder, in that of the run.
        config: the config of the run that goes on.
        allowed: whether something else may be learnt from here on.

    Raises:
        ConfigError: something else would be learnt, and nobody allowed it; or the run's config is no YAML.
    """
    file = checkpoint.parent.parent / "config.yaml"
    if not file.is_file():
        return
    then = read_file(str(file))
    refused = {name for name, key in keys(type(config)).items() if key.resumed == "refused"}
    if unseen := [name for name in config.from_environment if refers(at_key(then, name)) and name in refused]:
        say(
            f"Of these keys the run folder has no values, so that a change would not be seen: "
            f"{', '.join(unseen)}. They come from the environment."
        )
    changed = changes({str(name): value for name, value in then.items()}, config)
    learnt = [change for change in changed if change.key in refused]
    free = [f"{each.key} ({each.then}, now {each.now})" for each in changed if each.key not in refused]
    if free:
        say(f"Changed since {checkpoint}, in where, how fast or how long it runs: {', '.join(free)}.")
    if learnt and not allowed:
        raise ConfigError(
            f"the run there has learnt under other settings\n{side_by_side(learnt)}",
            field="trainer.default_local_dir",
            got=file.parent,
            remedy="set these keys as they were then; or choose another trainer.default_local_dir; or "
            "trainer.resume_mode=disable, which sets that run aside; or go on from its checkpoint all the "
            "same: trainer.resume_with_changes=true",
        )
    if learnt:
        say(f"Changed since {checkpoint}, with effect on what is learnt:\n{side_by_side(learnt)}")


def changes(then: Mapping[str, Any], config: Section) -> list[Change]:
    """The keys that have other values than they had.

    Args:
        then: the tree of the resolved config that a run began with, perhaps under the names of an older
            version. A key that it lacks did not exist yet, and counts as unchanged.
        config: the config of the run that goes on.
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
        if found.get(known[name].inherits or "") != (old, new)  # else the source says it
    ]


def _same(old: Any, new: Any) -> bool:
    """Whether two values are equal, as far as they were written."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_same(value, new[name]) for name, value in old.items())
    return old == LEFT_OUT or bool(old == new)


def _value(tree: Mapping[str, Any], written: Any) -> Any:
    """A value of a written config with its references filled in, as far as that can be done here."""
    if not refers(written):
        return written
    try:
        return resolved({**tree, "written": written}, "written")
    except ConfigError:
        return written


def side_by_side(changed: list[Change]) -> str:
    """A table of the keys, what they were and what they are, one line each."""
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
    """The value; of an aggregation that is left to the loss, that of the loss."""
    at, _, leaf = name.rpartition(".")
    if value is not None or leaf != "loss_agg_mode":
        return value
    loss = at_key(tree, f"{at}.policy_loss.loss_mode", _ABSENT)
    return published_aggregation(loss if isinstance(loss, str) else "")
