"""Load the config of a command, and handle --dry-run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from tandem.config.load import Loaded, load_rm_config, load_sft_config, load_train_config
from tandem.config.section import Section
from tandem.config.sources import split_arguments, to_yaml
from tandem.config.written import to_dict
from tandem.observability.terminal import warn

C = TypeVar("C", bound=Section)
Load = Callable[[str | None, Sequence[str]], Loaded[C]]

LOADERS: dict[str, Callable[..., Loaded[Any]]] = {
    "train": load_train_config,
    "sft": load_sft_config,
    "rm": load_rm_config,
}
"""A dict from training command to the function that loads its config."""


def resolved(arguments: list[str], load: Load[C], options: Collection[str] = ()) -> C | None:
    """Load the config from `[CONFIG.yaml] key=value …`; with --dry-run, print it and return None.

    Notes about the config go to standard error.

    Args:
        arguments: the words of the command line.
        load: loads the config.
        options: other options of the command. This function ignores them.

    Raises:
        ConfigError: the config is invalid, or an option is unknown.
    """
    words = [word for word in arguments if word not in ("--dry-run", *options)]
    loaded = load(*split_arguments(words))
    for notice in loaded.notices:
        warn(f"note: {notice}")
    if "--dry-run" in arguments:
        print(to_yaml(to_dict(loaded.config)))
        return None
    return loaded.config
