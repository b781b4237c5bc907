"""Merge the values that several tables have for the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import DataError
from tandem.protocol.equality import same

METRICS = "metrics"
"""The only key of meta_info for which concatenated tables may have different values."""


def merge(target: dict[str, Any], source: Mapping[str, Any], remedy: str) -> None:
    """Add the entries of `source` that `target` lacks.

    Raises:
        DataError: both dicts have a key with different values.
    """
    for name, value in source.items():
        if name in target and not same(target[name], value):
            raise DataError(
                "two tables have different values under one name",
                field=name,
                got=f"{value!r:.80}",
                expected=f"{target[name]!r:.80}",
                remedy=remedy,
            )
        target.setdefault(name, value)


def merged_meta_info(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the meta_info of tables that are concatenated.

    All values except `metrics` must be equal. `metrics` becomes a dict from a metric's name to the list of
    its values, in the order of the tables. A table may have one dict of metrics or a list of such dicts. If a
    metric's value is a list, its elements are added one by one.

    Raises:
        DataError: another key has different values, or metrics are not a dict.
    """
    facts: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for meta in metas:
        own = {name: fact for name, fact in meta.items() if name != METRICS}
        merge(facts, own, "select or change meta_info before you concatenate the tables")
        found = meta.get(METRICS) or {}
        for each in found if isinstance(found, list) else [found]:
            if not isinstance(each, Mapping):
                raise DataError("must be a dict", field=METRICS, got=repr(each), expected="{name: value, …}")
            for name, value in each.items():
                metrics.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return facts | ({METRICS: metrics} if metrics else {})
