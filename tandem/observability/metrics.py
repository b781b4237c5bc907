"""Metrics that know how they are reduced over micro-batches and ranks.

A value may be a tensor on any device; nothing is copied to the host before `to_floats`, which
fetches everything at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.device import to_device

Reduction = Literal["sum", "mean", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One value and how it combines with others of its name.

    Attributes:
        value: a scalar; for "mean" the weighted sum of the observations, not their mean.
        weight: for "mean" the sum of the weights; unused otherwise.
        reduction: how two of them combine.
    """

    value: Tensor | float
    weight: Tensor | float
    reduction: Reduction

    def merge(self, other: Metric) -> Metric:
        assert self.reduction == other.reduction, (self.reduction, other.reduction)
        if self.reduction in ("sum", "mean"):
            return Metric(self.value + other.value, self.weight + other.weight, self.reduction)
        pick = torch.maximum if self.reduction == "max" else torch.minimum  # these keep a NaN
        return Metric(pick(_scalar(self.value), _scalar(other.value)), 1.0, self.reduction)


class Metrics(dict[str, Metric]):
    """Named metrics of one phase; see the module's docstring."""

    def add_sum(self, name: str, value: Tensor | float) -> None:
        self._add(name, Metric(_detached(value), 1.0, "sum"))

    def add_mean(self, name: str, total: Tensor | float, weight: Tensor | float) -> None:
        """`total` is the weighted sum of the observations, `weight` the sum of their weights."""
        self._add(name, Metric(_detached(total), _detached(weight), "mean"))

    def add_max(self, name: str, value: Tensor | float) -> None:
        self._add(name, Metric(_detached(value), 1.0, "max"))

    def add_min(self, name: str, value: Tensor | float) -> None:
        self._add(name, Metric(_detached(value), 1.0, "min"))

    def _add(self, name: str, metric: Metric) -> None:
        self[name] = self[name].merge(metric) if name in self else metric

    @classmethod
    def merged(cls, parts: Iterable[Mapping[str, Metric]]) -> Metrics:
        """All observations of `parts` together."""
        out = cls()
        for part in parts:
            for name, metric in part.items():
                out._add(name, metric)
        return out

    def all_reduced(self, group: dist.ProcessGroup | None, device: torch.device) -> Metrics:
        """The same names reduced over the ranks of `group`; every rank must hold the same names."""
        out = Metrics()
        for reduction, op in _REDUCE_OPS.items():
            names = sorted(name for name, m in self.items() if m.reduction == reduction)
            if not names:
                continue
            table = _table([(self[name].value, self[name].weight) for name in names], device)
            dist.all_reduce(table, op=op, group=group)
            for name, row in zip(names, table, strict=True):
                out[name] = Metric(row[0], row[1], reduction)
        return out

    def to_floats(self) -> dict[str, float]:
        """Plain numbers, in one transfer per device. A mean of no observations is left out."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for metric in self.values():
            for part in (metric.value, metric.weight):
                if isinstance(part, Tensor):
                    by_device.setdefault(part.device, []).append(part.detach().double().reshape(()))
        fetched = {device: iter(torch.stack(parts).tolist()) for device, parts in by_device.items()}

        def number(part: Tensor | float) -> float:
            return next(fetched[part.device]) if isinstance(part, Tensor) else float(part)

        out: dict[str, float] = {}
        for name, metric in self.items():
            value, weight = number(metric.value), number(metric.weight)
            if metric.reduction != "mean":
                out[name] = value
            elif weight != 0:
                out[name] = value / weight
        return out


_REDUCE_OPS: dict[Reduction, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _detached(value: Tensor | float) -> Tensor | float:
    return value.detach() if isinstance(value, Tensor) else value


def _scalar(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).reshape(())


def _table(rows: Sequence[tuple[Tensor | float, Tensor | float]], device: torch.device) -> Tensor:
    """fp64 (rows, 2) on the device. What the host knows goes there in one copy."""
    parts = [part for row in rows for part in row]
    far = [isinstance(part, Tensor) and part.device.type != "cpu" for part in parts]
    known = [0.0 if away else float(part) for part, away in zip(parts, far, strict=True)]
    (table,) = to_device([torch.tensor(known, dtype=torch.float64)], device)
    for entry, part, away in zip(table, parts, far, strict=True):
        if away:
            entry.copy_(_scalar(part))
    return table.view(-1, 2)
