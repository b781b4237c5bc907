"""The drawings of the site, from a few words each: boxes on a grid and arrows between them, as SVG.

Colours are those of the page's text and links, so that a drawing is right in light and in dark.
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
    """A box.

    Attributes:
        column, row: its place in the grid; halves are allowed.
        lines: what stands in it, two lines at most.
        wide: how many columns it covers.
        soft: dashed: what is not always there.
    """

    column: float
    row: float
    lines: tuple[str, ...]
    wide: int = 1
    soft: bool = False


@dataclass(frozen=True)
class Arrow:
    """An arrow between two boxes, by name.

    Attributes:
        says: what stands beside its middle.
        soft: dashed.
    """

    start: str
    end: str
    says: str = ""
    soft: bool = False


@dataclass(frozen=True)
class Drawing:
    """A drawing.

    Attributes:
        title: what it shows, for those who do not see it.
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
        "One controller calls groups of workers; batches go from worker to worker, it sees an index",
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
        "Three sequences, one after the other: values and offsets, no padding",
        {
            "a": Box(0, 0, ("sequence 0", "prompt, response")),
            "b": Box(1, 0, ("sequence 1", "prompt, response")),
            "c": Box(2, 0, ("sequence 2", "prompt, response")),
            "o": Box(0, 1, ("offsets: 0, length 0, length 0 + 1, all",), wide=3),
        },
        (),
    ),
    "native": Drawing(
        "With the native engine one module trains and samples; to another engine weights are sent",
        {
            "module": Box(0, 0, ("module", "that is trained")),
            "native": Box(1.6, 0, ("native engine", "the same module")),
            "other": Box(1.6, 1.1, ("vLLM, SGLang", "a copy")),
            "digest": Box(3.2, 1.1, ("digests", "of both compared")),
        },
        (
            Arrow("module", "native", "shares"),
            Arrow("module", "other", "stream"),
            Arrow("other", "digest"),
        ),
    ),
    "staleness": Drawing(
        "Tokens are sampled at version v and learnt from at version v to v + k - 1",
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
        "Two log-probs of one token are compared on every step, and a difference is traced to its cause",
        {
            "rollout": Box(0, 0, ("rollout's", "log-probs")),
            "train": Box(0, 1, ("training's", "log-probs")),
            "compare": Box(1.2, 0.5, ("difference", "on every step")),
            "fine": Box(2.6, 0, ("within rounding", "nothing is said")),
            "cause": Box(2.6, 1, ("over the limit", "the cause is named")),
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
    """A drawing as a figure of the page."""
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
    if arrow.says:
        x, y = (x1 + x2) / 2, (y1 + y2) / 2
        beside = len(arrow.says) * _LETTER / 2 + 4 if abs(y2 - y1) > abs(x2 - x1) else 0
        y -= 0 if beside else 5
        yield f'<text x="{x + beside:g}" y="{y:g}" text-anchor="middle">{escape(arrow.says)}</text>'


def _ends(start: Box, end: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where an arrow leaves one box and reaches the other: at facing sides, or at a side and an edge."""
    if _left(end) > _right(start):
        return (_right(start), _top(start) + _HEIGHT / 2), (_left(end), _top(end) + _HEIGHT / 2)
    down = _top(end) > _top(start)
    x = (_left(end) + _right(end)) / 2 if start.wide > 1 else (_left(start) + _right(start)) / 2
    if _right(end) < _left(start):  # back: to the lower edge
        return (_left(start), _top(start) + _HEIGHT / 2), (
            (_left(end) + _right(end)) / 2,
            _top(end) + _HEIGHT,
        )
    return (x, _top(start) + (_HEIGHT if down else 0)), (x, _top(end) + (0 if down else _HEIGHT))
