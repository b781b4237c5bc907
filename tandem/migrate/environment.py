"""Translate the environment variables that verl reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tandem.peers.table import Reading, Rule, by_name, read_table

VARIABLES: dict[str, Rule] = by_name(read_table("verl_environment.yaml"))
"""A dict from environment variable to rule. A variable without a rule works as usual."""

_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def readings(variables: Mapping[str, str]) -> Iterator[Reading]:
    """Yield the translation of each variable, sorted by name. The values of secrets are not shown.

    Args:
        variables: a dict from name to value.
    """
    for name, value in sorted(variables.items()):
        known = VARIABLES.get(name, Rule(name, acts="passed on to the run's environment"))
        shown = "(given)" if any(part in name for part in _SECRET) else value
        yield Reading(name, shown, "ignored" if known.acts is None else "acts", known.reason)
