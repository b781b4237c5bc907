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
    """The curves in one frame, without colours; several are told apart by their marks and a legend.

    Args:
        curves: by name, points of finite numbers by step.
        size: columns and lines.
        limits: of the vertical axis; what the values span, where none are given.
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
