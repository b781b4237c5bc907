"""Draw small charts side by side in one SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Curve = list[tuple[float, float]]
"""Pairs of time and accuracy."""

WIDTH, HEIGHT = 190, 130
LEFT, TOP, RIGHT, BOTTOM = 30, 24, 10, 22
COLUMNS = 5
COLOURS = ("#1b6ca8", "#c44536", "#3a7d44", "#7b4b94", "#b8860b")


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: the text above the chart.
        note: the text at the lower right.
        curves: one line each, with y from 0 to 1.
        colours: the colours of the curves; they repeat if there are more curves.
    """

    title: str
    note: str
    curves: list[Curve]
    colours: Sequence[str] = COLOURS


def draw(panels: list[Panel], *, goal: float) -> str:
    """Draw the charts in rows of five with the same axes, and a dashed line at `goal`."""
    longest = max((x for panel in panels for curve in panel.curves for x, _ in curve), default=1.0) or 1.0
    rows = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * WIDTH, max(rows, 1) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="9">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, panel in enumerate(panels):
        row, column = divmod(place, COLUMNS)
        parts.append(f'<g transform="translate({column * WIDTH},{row * HEIGHT})">')
        parts += _panel(panel, longest, goal)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, longest: float, goal: float) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(x: float, y: float) -> str:
        return f"{LEFT + x / longest * (right - LEFT):.1f},{bottom - y * (bottom - TOP):.1f}"

    low, high = at(0, goal), at(longest, goal)
    (x1, y1), (x2, y2) = low.split(","), high.split(",")
    parts = [
        f'<text x="{LEFT}" y="{TOP - 8}" font-weight="bold">{escape(panel.title)}</text>',
        f'<text x="{right - 2}" y="{bottom - 6}" text-anchor="end">{escape(panel.note)}</text>',
        f'<polyline points="{at(0, 1)} {at(0, 0)} {at(longest, 0)}" fill="none" stroke="#888"/>',
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#aaa" stroke-dasharray="3 3"/>',
        f'<text x="{LEFT - 4}" y="{TOP + 3}" text-anchor="end">1</text>',
        f'<text x="{LEFT - 4}" y="{float(y1) + 3:.1f}" text-anchor="end">{goal}</text>',
        f'<text x="{LEFT - 4}" y="{bottom + 3}" text-anchor="end">0</text>',
        f'<text x="{right}" y="{bottom + 12}" text-anchor="end">{longest:.0f} s</text>',
    ]
    for number, curve in enumerate(panel.curves):
        points = " ".join(at(x, y) for x, y in curve)
        colour = panel.colours[number % len(panel.colours)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    return parts
