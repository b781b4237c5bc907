"""Environment variables that verl reads, and what each does for a run here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tandem.peers.table import Reading, Rule, by_name, read_table

VARIABLES: dict[str, Rule] = by_name(read_table("verl_environment.yaml"))
"""By name. A variable that is not here acts on whatever reads it, as it does everywhere."""

_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def readings(variables: Mapping[str, str]) -> Iterator[Reading]:
    """Yield what each variable does here, by name; no secret is shown.

    Args:
        variables: values by name.
    """
    for name, value in sorted(variables.items()):
        known = VARIABLES.get(name, Rule(name, acts="in the environment of the run"))
        shown = "(given)" if any(part in name for part in _SECRET) else value
        yield Reading(name, shown, "ignored" if known.acts is None else "acts", known.reason)
