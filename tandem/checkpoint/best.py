"""Choose the best checkpoint by one metric of the step at which the checkpoint was saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Best:
    """The rule that decides which checkpoint is the best.

    Attributes:
        metric: name of the metric, as in metrics.jsonl.
        mode: "max" if a higher value is better, "min" if a lower value is better.
    """

    metric: str
    mode: Literal["max", "min"] = "max"

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the value of the metric; None if it is missing or not finite."""
        found = metrics.get(self.metric)
        return None if found is None or not math.isfinite(found) else float(found)

    def choose(self, values: Mapping[int, float]) -> int | None:
        """Return the step with the best value; the first such step if values are equal; None without values.

        Args:
            values: a dict from step to the value of the metric.
        """
        sign = -1 if self.mode == "max" else 1
        return min(values, key=lambda step: (sign * values[step], step), default=None)
