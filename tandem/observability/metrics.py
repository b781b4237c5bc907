"""Metrics with their reductions over micro-batches and ranks.

A value may be a tensor on any device. No value is copied to the host before `to_floats`, which copies all
values at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.device import to_device

Number = Tensor | float
Spread = Literal["std", "sample_std", "ess"]
Reduction = Literal["sum", "mean", "max", "min"] | Spread


@dataclass(frozen=True, slots=True)
class Metric:
    """A value, and its reduction with other values of the same metric.

    Attributes:
        value: a scalar; for "mean" and spreads the weighted sum of the observations, not their mean.
        weight: for "mean" and spreads the sum of the weights; unused otherwise.
        reduction: how two values are combined.
        squares: for spreads the weighted sum of the squared observations; unused otherwise.
    """

    value: Number
    weight: Number
    reduction: Reduction
    squares: Number = 0.0

    def merge(self, other: Metric) -> Metric:
        assert self.reduction == other.reduction, (self.reduction, other.reduction)
        if self.reduction not in ("max", "min"):
            value, weight = self.value + other.value, self.weight + other.weight
            return Metric(value, weight, self.reduction, self.squares + other.squares)
        pick = torch.maximum if self.reduction == "max" else torch.minimum  # these keep a NaN
        return Metric(pick(_scalar(self.value), _scalar(other.value)), 1.0, self.reduction)


class Metrics(dict[str, Metric]):
    """A dict from name to metric, for the metrics of one phase."""

    def add_sum(self, name: str, value: Number) -> None:
        self._add(name, Metric(_detached(value), 1.0, "sum"))

    def add_mean(self, name: str, total: Number, weight: Number) -> None:
        """Add observations to a metric that is a weighted mean.

        Args:
            name: the metric's name.
            total: the weighted sum of the observations.
            weight: the sum of their weights.
        """
        self._add(name, Metric(_detached(total), _detached(weight), "mean"))

    def add_max(self, name: str, value: Number) -> None:
        self._add(name, Metric(_detached(value), 1.0, "max"))

    def add_min(self, name: str, value: Number) -> None:
        self._add(name, Metric(_detached(value), 1.0, "min"))

    def add_spread(self, name: str, reduction: Spread, total: Number, squares: Number, count: Number) -> None:
        """Add observations to a metric for the spread of all observations, over micro-batches and ranks.

        Args:
            name: the metric's name.
            reduction: "std", over the number of observations n; "sample_std", over n - 1, zero for one
                observation; "ess", the effective sample size as a fraction, mean² / mean of squares (Kong
                1992).
            total: the sum of the observations, in fp64 to avoid cancellation.
            squares: the sum of the squared observations, in fp64.
            count: n, the number of observations.
        """
        self._add(name, Metric(_detached(total), _detached(count), reduction, _detached(squares)))

    def _add(self, name: str, metric: Metric) -> None:
        self[name] = self[name].merge(metric) if name in self else metric

    @classmethod
    def merged(cls, parts: Iterable[Mapping[str, Metric]]) -> Metrics:
        """Return the metrics over the observations of all `parts`."""
        out = cls()
        for part in parts:
            for name, metric in part.items():
                out._add(name, metric)
        return out

    def all_reduced(self, group: dist.ProcessGroup | None, device: torch.device) -> Metrics:
        """Return the metrics reduced over the ranks of `group`. Every rank must have the same names."""
        out = Metrics()
        for reduction, op in _REDUCE_OPS.items():
            names = sorted(name for name, m in self.items() if m.reduction == reduction)
            if not names:
                continue
            parts = [(self[name].value, self[name].weight, self[name].squares) for name in names]
            width = 3 if reduction in _SPREADS else 2
            table = _table([row[:width] for row in parts], device)
            dist.all_reduce(table, op=op, group=group)
            for name, row in zip(names, table, strict=True):
                out[name] = Metric(row[0], row[1], reduction, *row[2:])
        return out

    @property
    def reduced_bytes(self) -> int:
        """The bytes that `all_reduced` exchanges: two fp64 numbers per metric, three per spread."""
        return sum(24 if metric.reduction in _SPREADS else 16 for metric in self.values())

    def to_floats(self) -> dict[str, float]:
        """Return the metrics as floats, with one transfer per device.

        A mean or spread without observations is left out.
        """
        by_device: dict[torch.device, list[Tensor]] = {}
        for metric in self.values():
            for part in (metric.value, metric.weight, metric.squares):
                if isinstance(part, Tensor):
                    by_device.setdefault(part.device, []).append(part.detach().double().reshape(()))
        fetched = {device: iter(torch.stack(parts).tolist()) for device, parts in by_device.items()}

        def number(part: Number) -> float:
            return next(fetched[part.device]) if isinstance(part, Tensor) else float(part)

        out: dict[str, float] = {}
        for name, metric in self.items():
            value, weight, squares = (number(part) for part in (metric.value, metric.weight, metric.squares))
            if metric.reduction in ("sum", "max", "min"):
                out[name] = value
            elif weight != 0:
                spread = metric.reduction in _SPREADS
                out[name] = _spread(metric.reduction, value, squares, weight) if spread else value / weight
        return out


_SPREADS: tuple[Reduction, ...] = ("std", "sample_std", "ess")
_SUMMED: tuple[Reduction, ...] = ("sum", "mean", *_SPREADS)


def _spread(reduction: Reduction, total: float, squares: float, count: float) -> float:
    """Return the spread; see `Metrics.add_spread`.

    If all observations are zero, the effective sample size is zero.
    """
    if math.isnan(total + squares):
        return math.nan
    if reduction == "ess":
        return total * total / (count * squares) if squares else 0.0
    rest = max(squares - total * total / count, 0.0)
    return math.sqrt(rest / (count if reduction == "std" else max(count - 1, 1)))


_REDUCE_OPS: dict[Reduction, dist.ReduceOp.RedOpType] = {
    **dict.fromkeys(_SUMMED, dist.ReduceOp.SUM),
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def _detached(value: Number) -> Number:
    return value.detach() if isinstance(value, Tensor) else value


def _scalar(value: Number) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).reshape(())


def _table(rows: Sequence[tuple[Number, ...]], device: torch.device) -> Tensor:
    """Return the rows as an fp64 tensor (rows, columns) on the device.

    Numbers on the host are copied to the device in one copy.
    """
    parts = [part for row in rows for part in row]
    far = [isinstance(part, Tensor) and part.device.type != "cpu" for part in parts]
    known = [0.0 if away else float(part) for part, away in zip(parts, far, strict=True)]
    (table,) = to_device([torch.tensor(known, dtype=torch.float64)], device)
    for entry, part, away in zip(table, parts, far, strict=True):
        if away:
            entry.copy_(_scalar(part))
    return table.view(len(rows), -1)
