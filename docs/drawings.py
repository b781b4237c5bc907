"""Draw the site's diagrams as SVG: boxes on a grid and arrows between them.

The colours are those of the page's text and links, so a diagram is readable in light and in dark mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

_COLUMN, _ROW, _WIDTH, _HEIGHT, _MARGIN = 170, 78, 132, 44, 14
_LETTER = 6.4
"""The mean width of a letter at 12 px."""


@dataclass(frozen=True)
class Box:
    """A box of a diagram.

    Attributes:
        column, row: the position in the grid; halves are allowed.
        lines: the text in the box, at most two lines.
        wide: how many columns the box covers.
        soft: draw a dashed border, for a part that not every run has.
    """

    column: float
    row: float
    lines: tuple[str, ...]
    wide: int = 1
    soft: bool = False


@dataclass(frozen=True)
class Arrow:
    """An arrow between two boxes.

    Attributes:
        start, end: the names of the boxes.
        label: the text beside the middle of the arrow.
        soft: draw a dashed line.
    """

    start: str
    end: str
    label: str = ""
    soft: bool = False


@dataclass(frozen=True)
class Drawing:
    """A diagram.

    Attributes:
        title: a description for readers who cannot see the diagram.
        boxes: the boxes by name.
        arrows: the arrows between boxes.
    """

    title: str
    boxes: dict[str, Box]
    arrows: tuple[Arrow, ...]


DRAWINGS = {
    "loop": Drawing(
        "One step: prompts, responses, scores, advantages, an update, and new weights back to the rollout",
        {
            "prompts": Box(0, 0.5, ("prompts",)),
            "rollout": Box(1, 0.5, ("rollout", "writes responses")),
            "reward": Box(2, 0, ("reward", "scores them")),
            "old": Box(2, 1, ("old log-probs", "values, reference")),
            "advantage": Box(3, 0.5, ("advantages",)),
            "update": Box(3, 2.4, ("update", "of the policy")),
        },
        (
            Arrow("prompts", "rollout"),
            Arrow("rollout", "reward"),
            Arrow("rollout", "old"),
            Arrow("reward", "advantage"),
            Arrow("old", "advantage"),
            Arrow("advantage", "update"),
            Arrow("update", "rollout", "new weights", soft=True),
        ),
    ),
    "controller": Drawing(
        "One controller calls worker groups; batches go between workers, the controller has an index",
        {
            "controller": Box(0, 0, ("controller", "one Python loop, an index of each batch"), wide=4),
            "actor": Box(0, 1.2, ("policy", "ranks 0 … n")),
            "critic": Box(1, 1.2, ("critic",), soft=True),
            "reference": Box(2, 1.2, ("reference",), soft=True),
            "score": Box(3, 1.2, ("rewards",)),
        },
        (
            Arrow("controller", "actor", "call"),
            Arrow("controller", "critic", "call"),
            Arrow("controller", "reference", "call"),
            Arrow("controller", "score", "call"),
            Arrow("actor", "critic", "data"),
            Arrow("critic", "reference"),
            Arrow("reference", "score"),
        ),
    ),
    "ragged": Drawing(
        "Three sequences stored one after the other: values and offsets, no padding",
        {
            "a": Box(0, 0, ("sequence 0", "prompt, response")),
            "b": Box(1, 0, ("sequence 1", "prompt, response")),
            "c": Box(2, 0, ("sequence 2", "prompt, response")),
            "o": Box(0, 1, ("offsets: 0, end of 0, end of 1, end of 2",), wide=3),
        },
        (),
    ),
    "native": Drawing(
        "The native engine samples from the module that is trained; other engines receive its weights",
        {
            "module": Box(0, 0, ("module", "being trained")),
            "native": Box(1.6, 0, ("native engine", "the same module")),
            "other": Box(1.6, 1.1, ("vLLM, SGLang", "a copy")),
            "digest": Box(3.2, 1.1, ("digests", "are compared")),
        },
        (
            Arrow("module", "native", "shared"),
            Arrow("module", "other", "weight sync"),
            Arrow("other", "digest"),
        ),
    ),
    "staleness": Drawing(
        "Tokens are sampled at version v and trained on at versions v to v + k - 1",
        {
            "v": Box(0, 0, ("version v", "writes a batch")),
            "one": Box(1, 0, ("mini-batch 1", "ratio = 1")),
            "two": Box(2, 0, ("mini-batch 2", "ratio drifts")),
            "three": Box(3, 0, ("mini-batch k", "clipped")),
            "next": Box(3, 1, ("version v + k", "writes the next")),
        },
        (Arrow("v", "one"), Arrow("one", "two"), Arrow("two", "three"), Arrow("three", "next")),
    ),
    "trust": Drawing(
        "Two log-probs of each token are compared on every step; a large difference is explained",
        {
            "rollout": Box(0, 0, ("rollout's", "log-probs")),
            "train": Box(0, 1, ("training's", "log-probs")),
            "compare": Box(1.2, 0.5, ("difference", "on every step")),
            "fine": Box(2.6, 0, ("within rounding", "no message")),
            "cause": Box(2.6, 1, ("over the limit", "message with cause")),
        },
        (
            Arrow("rollout", "compare"),
            Arrow("train", "compare"),
            Arrow("compare", "fine"),
            Arrow("compare", "cause"),
        ),
    ),
}


def drawing(name: str) -> str:
    """Return a diagram as an HTML figure."""
    shown = DRAWINGS[name]
    width = max(_right(box) for box in shown.boxes.values()) + _MARGIN
    height = max(_top(box) + _HEIGHT for box in shown.boxes.values()) + _MARGIN
    parts = [
        f'<figure><svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" class="drawing">',
        f"<title>{escape(shown.title)}</title>",
        f'<defs><marker id="head-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        *(part for arrow in shown.arrows for part in _arrow(name, shown, arrow)),
        *(part for box in shown.boxes.values() for part in _box(box)),
    ]
    return f"{''.join(parts)}</svg></figure>"


def _left(box: Box) -> float:
    return _MARGIN + box.column * _COLUMN


def _top(box: Box) -> float:
    return _MARGIN + box.row * _ROW


def _right(box: Box) -> float:
    return _left(box) + (box.wide - 1) * _COLUMN + _WIDTH


def _box(box: Box) -> Iterator[str]:
    left, top, right = _left(box), _top(box), _right(box)
    dashed = ' class="soft"' if box.soft else ""
    yield f'<rect x="{left:g}" y="{top:g}" width="{right - left:g}" height="{_HEIGHT}" rx="6"{dashed}/>'
    first = top + _HEIGHT / 2 + (5 if len(box.lines) == 1 else -2)
    for number, line in enumerate(box.lines):
        y = first + 15 * number
        yield f'<text x="{(left + right) / 2:g}" y="{y:g}" text-anchor="middle">{escape(line)}</text>'


def _arrow(name: str, shown: Drawing, arrow: Arrow) -> Iterator[str]:
    (x1, y1), (x2, y2) = _ends(shown.boxes[arrow.start], shown.boxes[arrow.end])
    dashed = ' class="soft"' if arrow.soft else ""
    yield f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" marker-end="url(#head-{name})"{dashed}/>'
    if arrow.label:
        x, y = (x1 + x2) / 2, (y1 + y2) / 2
        beside = len(arrow.label) * _LETTER / 2 + 4 if abs(y2 - y1) > abs(x2 - x1) else 0
        y -= 0 if beside else 5
        yield f'<text x="{x + beside:g}" y="{y:g}" text-anchor="middle">{escape(arrow.label)}</text>'


def _ends(start: Box, end: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return where an arrow leaves one box and reaches the other.

    Arrows connect facing sides; an arrow back to the left ends at a lower edge.
    """
    if _left(end) > _right(start):
        return (_right(start), _top(start) + _HEIGHT / 2), (_left(end), _top(end) + _HEIGHT / 2)
    down = _top(end) > _top(start)
    x = (_left(end) + _right(end)) / 2 if start.wide > 1 else (_left(start) + _right(start)) / 2
    if _right(end) < _left(start):  # An arrow back to the left ends at the lower edge.
        return (_left(start), _top(start) + _HEIGHT / 2), (
            (_left(end) + _right(end)) / 2,
            _top(end) + _HEIGHT,
        )
    return (x, _top(start) + (_HEIGHT if down else 0)), (x, _top(end) + (0 if down else _HEIGHT))
