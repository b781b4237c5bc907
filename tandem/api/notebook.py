"""Draw the reward curve of a run in a notebook while the run trains."""

from __future__ import annotations

import sys
from typing import Any

from tandem.trainer.loop import Step

WIDTH, HEIGHT = 640, 160
CURVE_METRICS = ("val/accuracy", "reward/mean")
"""The metrics that the curve can show, the preferred metric first."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class LiveCurve:
    """A listener of the training loop that draws the reward curve in a notebook after each step."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVE_METRICS}
        self._display: Any = None

    def __call__(self, step: Step) -> None:
        if not in_notebook():
            return
        for name, points in self._points.items():
            if name in step.metrics:
                points.append((step.number, step.metrics[name]))
        shell = sys.modules["IPython.display"]
        picture = shell.SVG(self.svg())
        if self._display is None:
            self._display = shell.display(picture, display_id=True)
        else:
            self._display.update(picture)

    def svg(self) -> str:
        """Return the curve of the metric with the most points, as SVG."""
        name, points = max(self._points.items(), key=lambda item: len(item[1]))
        low, high = min((y for _, y in points), default=0.0), max((y for _, y in points), default=1.0)
        first, last = (points[0][0], points[-1][0]) if points else (0, 1)
        places = " ".join(
            f"{40 + (WIDTH - 60) * (x - first) / max(1, last - first):.1f},"
            f"{HEIGHT - 25 - (HEIGHT - 50) * (y - low) / ((high - low) or 1):.1f}"
            for x, y in points
        )
        text = '<text x="{x}" y="{y}" font-size="11" fill="gray">{words}</text>'
        labels = [
            text.format(x=40, y=14, words=f"{name}, step {last}: {points[-1][1] if points else 0:.3f}"),
            text.format(x=0, y=30, words=f"{high:.2f}"),
            text.format(x=0, y=HEIGHT - 22, words=f"{low:.2f}"),
            text.format(x=40, y=HEIGHT - 6, words=first),
            text.format(x=WIDTH - 30, y=HEIGHT - 6, words=last),
        ]
        line = f'<polyline points="{places}" fill="none" stroke="steelblue" stroke-width="2"/>'
        size = f'width="{WIDTH}" height="{HEIGHT}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{line}{"".join(labels)}</svg>'
