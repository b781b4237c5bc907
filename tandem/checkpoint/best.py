"""Best: chooses the best checkpoint, by one metric of the step it was saved at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Best:
    """The judge of checkpoints.

    Attributes:
        metric: its name, as in metrics.jsonl.
        mode: whether more is better, or less.
    """

    metric: str
    mode: Literal["max", "min"] = "max"

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The metric, if there is one that can be compared."""
        found = metrics.get(self.metric)
        return None if found is None or not math.isfinite(found) else float(found)

    def choose(self, values: Mapping[int, float]) -> int | None:
        """The step with the best value, the first of equals; None where there is none.

        Args:
            values: by step.
        """
        sign = -1 if self.mode == "max" else 1
        return min(values, key=lambda step: (sign * values[step], step), default=None)
