"""Environment variables that verl reads, and what each does for a run here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tandem.peers.table import Reading, Rule, by_name, read_table

VARIABLES: dict[str, Rule] = by_name(read_table("verl_environment.yaml"))
"""The rule of each variable. A variable without a rule affects any program that reads it, as usual."""

_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def readings(variables: Mapping[str, str]) -> Iterator[Reading]:
    """Yield what each variable does here, sorted by name. The values of secrets are not shown.

    Args:
        variables: values by name.
    """
    for name, value in sorted(variables.items()):
        known = VARIABLES.get(name, Rule(name, acts="passed on to the run's environment"))
        shown = "(given)" if any(part in name for part in _SECRET) else value
        yield Reading(name, shown, "ignored" if known.acts is None else "acts", known.reason)
