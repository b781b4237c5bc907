"""The beginning that commands share: their help, their config, and the dry run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from tandem.config.load import Loaded
from tandem.config.section import Section
from tandem.config.sources import split_arguments, to_yaml
from tandem.config.written import to_dict
from tandem.observability.terminal import warn

C = TypeVar("C", bound=Section)
Load = Callable[[str | None, Sequence[str]], Loaded[C]]


def resolved(arguments: list[str], usage: str, load: Load[C], options: Collection[str] = ()) -> C | None:
    """The config of `[CONFIG.yaml] key=value …`; None where help or a dry run was asked for and given. What
    the user should know about the config goes to stderr.

    Args:
        options: words of the command that are no settings, beside --dry-run.

    Raises:
        ConfigError: whatever is wrong with the config, or an unknown option.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)
        return None
    words = [word for word in arguments if word not in ("--dry-run", *options)]
    loaded = load(*split_arguments(words))
    for notice in loaded.notices:
        warn(f"note: {notice}")
    if "--dry-run" in arguments:
        print(to_yaml(to_dict(loaded.config)))
        return None
    return loaded.config
