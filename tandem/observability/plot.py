"""Curves as text, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotext

from tandem.observability.terminal import printable

_MARKERS = ("x", "o", "+", "*", "#")


def plot(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    title: str,
    *,
    size: tuple[int, int] = (72, 16),
    limits: tuple[float, float] | None = None,
) -> str:
    """Return a plot of the curves as text, without colors. Several curves have different marks and a legend.

    Args:
        curves: a dict from the curve's name to its points (step, finite value).
        title: the title of the frame.
        size: the plot's width in columns and height in lines.
        limits: the limits of the vertical axis; None: the range of the values.
    """
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(*size)
    for number, (name, points) in enumerate(curves.items()):
        plotext.plot(
            [step for step, _ in points],
            [value for _, value in points],
            marker="braille" if len(curves) == 1 else _MARKERS[number % len(_MARKERS)],
            label=printable(name) if len(curves) > 1 else None,
        )
    if limits is not None:
        plotext.ylim(*limits)
    plotext.title(printable(title))
    plotext.xlabel("step")
    return str(plotext.uncolorize(plotext.build()))
