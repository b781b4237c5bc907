"""Merging of what several tables hold under one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import DataError
from tandem.protocol.equality import same

METRICS = "metrics"
"""The name in meta_info under which tables that are put together may hold different values."""


def merge(target: dict[str, Any], source: Mapping[str, Any], remedy: str) -> None:
    """Adds what `target` lacks.

    Raises:
        DataError: a name that stands in both with different values.
    """
    for name, value in source.items():
        if name in target and not same(target[name], value):
            raise DataError(
                "two tables hold different values under one name",
                field=name,
                got=f"{value!r:.80}",
                expected=f"{target[name]!r:.80}",
                remedy=remedy,
            )
        target.setdefault(name, value)


def together(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The meta_info of tables that are put below each other: equal facts, and under `metrics` a list of each
    metric's values, in the order of the tables. A table has one dict of metrics, or a list of them; a value
    that is a list is several.

    Raises:
        DataError: another name with different values, or metrics that are no dict.
    """
    facts: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for meta in metas:
        own = {name: fact for name, fact in meta.items() if name != METRICS}
        merge(facts, own, "select or change meta_info before the tables are put together")
        found = meta.get(METRICS) or {}
        for each in found if isinstance(found, list) else [found]:
            if not isinstance(each, Mapping):
                raise DataError("no metrics", field=METRICS, got=repr(each), expected="{name: value, …}")
            for name, value in each.items():
                metrics.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return facts | ({METRICS: metrics} if metrics else {})
